//! What the engine tells whoever watches it.

use crate::manager::Tables;
use crate::pool::BlockId;

/// Sees every change of a block table, when it happens. A sequence is one admission of a request.
pub(crate) trait Watch {
    /// Blocks were allocated to a running sequence and appended to its table of `group`.
    fn grew(&mut self, sequence: u32, group: usize, blocks: &[BlockId]);

    /// Blocks fell behind the window of `group` and were given back.
    fn left_window(&mut self, sequence: u32, group: usize, blocks: &[BlockId]);

    /// A sequence finished or was preempted, and is about to give back its blocks.
    fn released(&mut self, sequence: u32, tables: &Tables);

    /// The engine computed the token at `position` of a sequence and wrote its keys and values.
    fn computed(&mut self, sequence: u32, position: u32, tables: &Tables);
}
