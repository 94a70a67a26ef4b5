// The one kernel of the CUDA backend. It also compiles as C++ (see tests/cuda_shim.h): threads do
// not cooperate, so a loop over the grid runs it.
//
// Work is cut into items: (block of the step, chunk of the group's blocks). A chunk is up to
// CHUNK_BYTES of one plane of one segment, and a warp writes it. Thus a huge page, a thousand small
// ones and a thousand layers all make items of like size, whatever a step is made of.
//
// Each tile is followed by as much of itself as a chunk can reach, so that a copy never wraps.

typedef unsigned char u8;
typedef int i32;
typedef unsigned int u32;
typedef unsigned long long u64;

// Fields stand as in the NumPy types of tables.py.
struct Segment {
  u64 address, block_stride, plane_stride, slot_stride;
  u64 tile, period, constant, hash;
  u64 first_offset, plane_offset, slots, slot_bytes, run_bytes;
  u64 first_slot, tokens_per_slot, interleave;
};
struct Chunk {
  u64 segment, plane, first, end;  // bytes [first, end) of the plane in packed order
};
struct Group {
  u64 first_chunk, num_chunks;
};
// The step's header, then `first_item` and `first_id`, each of num_groups + 1, then what the
// offsets say, in bytes from the header.
struct Step {
  u64 num_partials, ids, partials, keys;  // keys: 0 where block ids are the keys
};

static __device__ __forceinline__ u64 mix(u64 z) {  // SplitMix64
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

static __device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// The first slot, counted from the segment's own, that holds no token before `token` on any rank.
static __device__ __forceinline__ u64 slot_of(const Segment& s, u64 token) {
  const u64 stripe = s.interleave * s.tokens_per_slot;
  const u64 slot = token / stripe * s.interleave + smaller(token % stripe, s.interleave);
  return slot < s.first_slot ? 0 : smaller(slot - s.first_slot, s.slots);
}

// 16 bytes of a tile from any address; `shift` is the address modulo 16.
static __device__ __forceinline__ ulonglong2 load(const u8* source, u32 shift) {
  const ulonglong2* words = (const ulonglong2*)(source - shift);
  const ulonglong2 low = __ldg(words);
  if (shift == 0) return low;
  const ulonglong2 high = __ldg(words + 1);
  u64 a = low.x, b = low.y, c = high.x;
  if (shift >= 8) { a = low.y; b = high.x; c = high.y; }
  const u32 bits = shift % 8 * 8;
  ulonglong2 result = {a, b};
  if (bits) { result.x = a >> bits | b << (64 - bits); result.y = b >> bits | c << (64 - bits); }
  return result;
}

// A warp copies `size` bytes, the body in words of 16 and the ends byte by byte.
static __device__ __forceinline__ void copy(u8* target, const u8* source, u64 size, u32 lane,
                                            bool constant) {
  __builtin_assume(__isGlobal(target));  // from an integer, the compiler cannot tell
  __builtin_assume(__isGlobal(source));
  const u64 head = smaller((0 - (u64)target) % 16, size);
  if (lane < head) target[lane] = source[lane];
  target += head;
  source += head;
  const u64 words = (size - head) / 16;
  const u64 tail = (size - head) % 16;
  ulonglong2* to = (ulonglong2*)target;
  const u32 shift = (u32)((u64)source % 16);
  u64 i = lane;
  if (constant) {
    if (i < words) {
      const ulonglong2 word = load(source, shift);
#pragma unroll 1
      for (; i < words; i += 32) to[i] = word;
    }
  } else {
    if (shift == 0) {
      const ulonglong2* from = (const ulonglong2*)source;
#pragma unroll 1  // four loads in flight are enough, and more registers would cost warps
      for (; i + 96 < words; i += 128) {
        const ulonglong2 a = __ldg(from + i), b = __ldg(from + i + 32);
        const ulonglong2 c = __ldg(from + i + 64), d = __ldg(from + i + 96);
        to[i] = a;
        to[i + 32] = b;
        to[i + 64] = c;
        to[i + 96] = d;
      }
    }
#pragma unroll 1
    for (; i < words; i += 32) to[i] = load(source + 16 * i, shift);
  }
  if (lane < tail) target[16 * words + lane] = source[16 * words + lane];
}

extern "C" __global__ void __launch_bounds__(256)
    fill(const Segment* segments, const Chunk* chunks, const Group* groups, u64 num_groups,
         const Step* step) {
  const u64* first_item = (const u64*)(step + 1);
  const u64* first_id = first_item + num_groups + 1;
  const i32* ids = (const i32*)((const u8*)step + step->ids);
  const i32* partials = (const i32*)((const u8*)step + step->partials);
  const u64* keys = (const u64*)((const u8*)step + step->keys);
  const u64 num_items = first_item[num_groups];
  const u64 stride = (u64)gridDim.x * blockDim.x / 32;
  const u32 lane = threadIdx.x % 32;
  u64 group = 0;
  for (u64 item = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32; item < num_items;
       item += stride) {
    while (item >= first_item[group + 1]) ++group;
    const u64 within = item - first_item[group];
    const u64 position = first_id[group] + within / groups[group].num_chunks;
    const Chunk chunk = chunks[groups[group].first_chunk + within % groups[group].num_chunks];
    const Segment& s = segments[chunk.segment];
    u64 first = chunk.first, end = chunk.end;

    u64 low = 0, high = step->num_partials;  // partials are sorted by position
    while (low < high) {
      const u64 middle = (low + high) / 2;
      if ((u64)partials[3 * middle] < position) low = middle + 1; else high = middle;
    }
    if (low < step->num_partials && (u64)partials[3 * low] == position) {
      const u64 from = slot_of(s, partials[3 * low + 1]) * s.slot_bytes;
      const u64 to = slot_of(s, partials[3 * low + 2]) * s.slot_bytes;
      if (first < from) first = from;
      end = smaller(end, to);
    }
    if (first >= end) continue;

    const u64 block = (u64)ids[position];
    u64 phase = s.first_offset + chunk.plane * s.plane_offset + first;
    if (!s.constant) {
      phase += 16 * (mix(s.hash + (step->keys ? keys[position] : block)) % (s.period / 16));
    }
    const u8* source = (const u8*)(s.tile + phase % s.period);
    const u64 plane = s.address + block * s.block_stride + chunk.plane * s.plane_stride;
    while (first < end) {
      const u64 run = first / s.run_bytes;
      const u64 size = smaller(end, (run + 1) * s.run_bytes) - first;
      copy((u8*)(plane + run * s.slot_stride + (first - run * s.run_bytes)), source, size, lane,
           s.constant);
      source += size;
      first += size;
    }
  }
}
