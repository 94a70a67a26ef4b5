// Runs the kernel over buffers of exactly the size they have, each in an allocation of its own, so
// that the address sanitizer sees one byte too many. The case is read from standard input, and the
// buffers are written back.
//
// u64 numbers: blocks, regions, segments; arguments[5]; per region: address in the caller, size;
// per segment: the region it lies in; then the bytes of the regions. Addresses in arguments and
// segments are the caller's. Segments are region `arguments[0]`.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "cuda_shim.h"

static void take(void* to, size_t size) {
  if (size && fread(to, 1, size, stdin) != size) abort();
}

int main() {
  u64 head[3], arguments[5];
  take(head, sizeof head);
  take(arguments, sizeof arguments);
  std::vector<u64> olds(head[1]), sizes(head[1]), homes(head[2]);
  for (u64 i = 0; i < head[1]; ++i) { take(&olds[i], 8); take(&sizes[i], 8); }
  take(homes.data(), 8 * head[2]);
  std::vector<u8*> bases, news;
  for (u64 i = 0; i < head[1]; ++i) {
    const u64 lead = olds[i] % 16;  // alignment is part of the case
    bases.push_back((u8*)malloc(lead + sizes[i]));
    news.push_back(bases[i] + lead);
    memset(bases[i], 0xEE, lead);
    take(news[i], sizes[i]);
  }
  auto moved = [&](u64 address) {
    for (u64 i = 0; i < head[1]; ++i)
      if (address - olds[i] < sizes[i]) return (u64)news[i] + (address - olds[i]);
    abort();
  };
  for (int i : {0, 1, 2, 4}) arguments[i] = moved(arguments[i]);
  Segment* segments = (Segment*)arguments[0];
  for (u64 i = 0; i < head[2]; ++i) {
    segments[i].address += (u64)news[homes[i]] - olds[homes[i]];
    segments[i].tile = moved(segments[i].tile);
  }
  run((unsigned)head[0], arguments);
  for (u64 i = 0; i < head[1]; ++i) {
    for (u64 byte = 0; byte < olds[i] % 16; ++byte) if (bases[i][byte] != 0xEE) abort();
    fwrite(news[i], 1, sizes[i], stdout);
    free(bases[i]);
  }
}
