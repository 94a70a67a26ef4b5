//! Lines of a plain or gzip stream, none of them unreasonably long.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use flate2::bufread::MultiGzDecoder;

use super::RowError;

/// Longest line that is read, in bytes. A row of a million ids is a tenth of that.
const MAX_LINE_BYTES: u64 = 64 << 20;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A stream of numbered lines.
pub(crate) struct Lines<'r> {
    reader: Box<dyn BufRead + 'r>,
    buffer: Vec<u8>,
    line: u64,
}

impl<'r> Lines<'r> {
    pub(crate) fn new(mut reader: impl Read + 'r) -> io::Result<Self> {
        let mut magic = Vec::with_capacity(GZIP_MAGIC.len());
        reader.by_ref().take(GZIP_MAGIC.len() as u64).read_to_end(&mut magic)?;
        let zipped = magic == GZIP_MAGIC;
        let whole = BufReader::with_capacity(1 << 16, Cursor::new(magic).chain(reader));
        let reader: Box<dyn BufRead + 'r> = if zipped {
            Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(whole)))
        } else {
            Box::new(whole)
        };
        Ok(Self { reader, buffer: Vec::new(), line: 0 })
    }

    /// Number of the last line read, from 1.
    pub(crate) fn line(&self) -> u64 {
        self.line
    }

    /// The next line that is not blank, and its number.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, &str)>, RowError> {
        loop {
            self.line += 1;
            self.buffer.clear();
            let mut bounded = self.reader.by_ref().take(MAX_LINE_BYTES + 1);
            let length = bounded.read_until(b'\n', &mut self.buffer)?;
            if length == 0 {
                return Ok(None);
            }
            if length as u64 > MAX_LINE_BYTES {
                return Err(RowError::LineTooLong { max: MAX_LINE_BYTES });
            }
            if self.line == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
                self.buffer.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.buffer.trim_ascii().is_empty() {
                break;
            }
        }
        let text = std::str::from_utf8(&self.buffer).map_err(|_| RowError::NotUtf8)?;
        Ok(Some((self.line, text.trim_ascii())))
    }
}
