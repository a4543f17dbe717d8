/* Kernels of the sparse codec (SPEC 9.3): the loops of deltaformat/encodings/, whose array code is their reference.

   Bit-identical to it, and optional: without this module NumPy serves. Everything walks a block once, in chunks that
   stay in the first cache, on two primitives that turn 64 bytes into 64 bits: which of them differ, and which are
   in a range. Only these exist per instruction set; the fastest that the CPU has is chosen when the module is
   loaded (DELTAFORMAT_NATIVE names another, or 0 for none). The GIL is released around all work that is not small, and
   once in a call. Buffers may have any alignment; what is read from one is never trusted to be the same when it is
   read again. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "these kernels are for little-endian machines; on others NumPy serves"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define popcount(x) ((u32)__builtin_popcountll(x))
#define lowest(x) ((u32)__builtin_ctzll(x))
#define bit_length(x) (64 - (u32)__builtin_clzll(x)) /* of a positive number */
#else
#define INLINE static inline
INLINE u32 popcount(u64 x) {
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    return (u32)(((x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * 0x0101010101010101u >> 56);
}
INLINE u32 lowest(u64 x) { return popcount(~x & (x - 1)); }
INLINE u32 bit_length(u64 x) {
    u32 length = 0;
    for (; x; x >>= 1)
        length++;
    return length;
}
#endif

#define MAX_THRESHOLDS 15
#define MAX_STRATA (MAX_THRESHOLDS + 1)
#define MAX_K 26
#define ESCAPE 255
#define NO_RANK UINT32_MAX
#define LEAST_CHANGES 32 /* as in thresholds.py */
#define LEAST_GAIN 256
#define CHUNK 256 /* elements */
#define WORDS (CHUNK / 64)
#define LINES 64 /* of 64 bytes */

INLINE u64 load(const u8 *from, size_t size) {
    u64 value = 0;
    memcpy(&value, from, size);
    return value;
}

/* For what is made with sizes that the compiler knows. */
#define BY_WIDTH(LOG_WIDTH, CASE)                                                                                      \
    switch (LOG_WIDTH) {                                                                                               \
    case 0: CASE(0, u8); break;                                                                                        \
    case 1: CASE(1, u16); break;                                                                                       \
    case 2: CASE(2, u32); break;                                                                                       \
    default: CASE(3, u64); break;                                                                                      \
    }

INLINE u64 load_element(const u8 *from, u32 log_width) { return load(from, (size_t)1 << log_width); }

INLINE void store_element(u8 *to, u32 log_width, u64 value) { memcpy(to, &value, (size_t)1 << log_width); }

/* -- The primitives ----------------------------------------------------------------------------------------------- */

typedef u64 (*Differ)(const u8 *, const u8 *); /* bit i: byte i of the one is not byte i of the other */
typedef u64 (*Within)(const u8 *, u8, u8);     /* bit i: byte i is at least y, and above it by at most z */
typedef u32 (*Select)(u64, u32);               /* place of the set bit number r, which the word has */

#define HIGHS 0x8080808080808080u
#define ONES 0x0101010101010101u

INLINE u64 gather_highs(u64 highs) { return (highs >> 7) * 0x0102040810204080u >> 56; } /* the 8 high bits, as a byte */

static inline u64 differ_portable(const u8 *a, const u8 *b) {
    u64 bits = 0;
    for (int i = 0; i < 8; i++) {
        u64 x = load(a + 8 * i, 8) ^ load(b + 8 * i, 8);
        if (x)
            bits |= gather_highs((((x & ~HIGHS) + ~HIGHS) | x) & HIGHS) << 8 * i;
    }
    return bits;
}

static inline u64 within_portable(const u8 *keys, u8 first, u8 span) {
    u64 bits = 0, y = span * ONES, z = first * ONES;
    for (int i = 0; i < 8; i++) {
        u64 x = load(keys + 8 * i, 8);
        x = ((x | HIGHS) - (z & ~HIGHS)) ^ ((x ^ ~z) & HIGHS); /* x - z in each byte */
        u64 low = (y | HIGHS) - (x & ~HIGHS);                  /* of the low 7 bits: y is at least x */
        bits |= gather_highs(((~x & y) | (~(x ^ y) & low)) & HIGHS) << 8 * i;
    }
    return bits;
}

static inline u32 select_portable(u64 word, u32 rank) {
    u32 place = 0;
    for (u32 half = 32; half; half >>= 1) {
        u32 count = popcount(word & (((u64)1 << half) - 1));
        u32 above = rank >= count ? half : 0;
        rank -= above ? count : 0;
        word >>= above;
        place += above;
    }
    return place;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,bmi,bmi2,popcnt")))

AVX2 static inline u32 equal_32(__m256i a, __m256i b) { return (u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)); }
AVX2 static inline __m256i load_32(const u8 *from) { return _mm256_loadu_si256((const __m256i *)from); }
AVX2 static inline u64 differ_avx2(const u8 *a, const u8 *b) {
    return ~(equal_32(load_32(a), load_32(b)) | (u64)equal_32(load_32(a + 32), load_32(b + 32)) << 32);
}
AVX2 static inline u64 within_avx2(const u8 *keys, u8 first, u8 span) {
    __m256i y = _mm256_set1_epi8((char)span), z = _mm256_set1_epi8((char)first);
    __m256i low = _mm256_sub_epi8(load_32(keys), z), high = _mm256_sub_epi8(load_32(keys + 32), z);
    return equal_32(_mm256_min_epu8(low, y), low) | (u64)equal_32(_mm256_min_epu8(high, y), high) << 32;
}
AVX2 static inline u32 select_avx2(u64 word, u32 rank) {
    return select_portable(word, rank); /* pdep is slow in some CPUs that have AVX2 */
}

AVX512 static inline u64 differ_avx512(const u8 *a, const u8 *b) {
    return _mm512_cmpneq_epu8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
}
AVX512 static inline u64 within_avx512(const u8 *keys, u8 first, u8 span) {
    __m512i above = _mm512_sub_epi8(_mm512_loadu_si512(keys), _mm512_set1_epi8((char)first));
    return _mm512_cmple_epu8_mask(above, _mm512_set1_epi8((char)span));
}
AVX512 static inline u32 select_avx512(u64 word, u32 rank) { return lowest(_pdep_u64((u64)1 << rank, word)); }

#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#define NEON /* every arm64 has it */

NEON static inline u64 gather_64(const uint8x16_t flags[4]) { /* all ones or zeros in each byte -> bits */
    const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t low = vpaddq_u8(vandq_u8(flags[0], weights), vandq_u8(flags[1], weights));
    uint8x16_t high = vpaddq_u8(vandq_u8(flags[2], weights), vandq_u8(flags[3], weights));
    low = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(low, low)), 0);
}
NEON static inline u64 differ_neon(const u8 *a, const u8 *b) {
    uint8x16_t flags[4];
    for (int i = 0; i < 4; i++)
        flags[i] = vmvnq_u8(vceqq_u8(vld1q_u8(a + 16 * i), vld1q_u8(b + 16 * i)));
    return gather_64(flags);
}
NEON static inline u64 within_neon(const u8 *keys, u8 first, u8 span) {
    uint8x16_t flags[4];
    for (int i = 0; i < 4; i++)
        flags[i] = vcleq_u8(vsubq_u8(vld1q_u8(keys + 16 * i), vdupq_n_u8(first)), vdupq_n_u8(span));
    return gather_64(flags);
}
NEON static inline u32 select_neon(u64 word, u32 rank) { return select_portable(word, rank); }
#endif

/* -- Diff ----------------------------------------------------------------------------------------------------------- */

INLINE u64 fold(u64 bytes, u32 log_width) { /* bits of bytes -> at each element's first byte, whether any is set */
    static const u64 firsts[] = {~(u64)0, 0x5555555555555555u, 0x1111111111111111u, ONES};
    for (u32 i = 0; i < log_width; i++)
        bytes |= bytes >> (1 << i);
    return bytes & firsts[log_width];
}

INLINE size_t put_places(u64 bits, size_t first, u32 log_width, u32 *places, size_t room, size_t count) {
    for (bits = fold(bits, log_width); bits; bits &= bits - 1, count++)
        if (count < room)
            places[count] = (u32)((first + lowest(bits)) >> log_width);
    return count;
}

/* Which lines differ cannot be foretold: they are marked first, without a branch, and then looked at. */
INLINE size_t diff_body(const u8 *a, const u8 *b, size_t size, u32 log_width, u32 *places, size_t room, Differ differ) {
    size_t count = 0, at = 0;
    for (; at + 64 * LINES <= size; at += 64 * LINES) {
        u64 bits[LINES], found = 0;
        for (u32 i = 0; i < LINES; i++) {
            bits[i] = differ(a + at + 64 * i, b + at + 64 * i);
            found |= (u64)(bits[i] != 0) << i;
        }
        for (; found; found &= found - 1)
            count = put_places(bits[lowest(found)], at + 64 * lowest(found), log_width, places, room, count);
    }
    for (; at < size; at += 64) {
        u8 last[2][64] = {{0}};
        const size_t left = size - at < 64 ? size - at : 64;
        memcpy(last[0], a + at, left);
        memcpy(last[1], b + at, left);
        count = put_places(differ(last[0], last[1]), at, log_width, places, room, count);
    }
    return count;
}

/* -- Strata --------------------------------------------------------------------------------------------------------- */

/* Every element has a key, a byte that is below limits[i] where its magnitude is below threshold i: the magnitude's upper
   bits where the thresholds allow it, as exponents of most floats do, else the number of thresholds not above it. */
typedef struct {
    u32 log_width, thresholds, by_bits;
    u64 values[MAX_THRESHOLDS];
    u8 limits[MAX_THRESHOLDS], stratum_of[256]; /* by key */
    u8 lowest[MAX_STRATA], span[MAX_STRATA];    /* the keys of a stratum */
} Strata;

#define KEY_SHIFT(TYPE) (sizeof(TYPE) == 1 ? 0 : 8 * sizeof(TYPE) - 9)

static void prepare(Strata *strata) {
    const u32 shift = strata->log_width ? (8u << strata->log_width) - 9 : 0;
    u64 rest = 0;
    for (u32 i = 0; i < strata->thresholds; i++)
        rest |= strata->values[i] & (((u64)1 << shift) - 1);
    strata->by_bits = rest == 0;
    for (u32 i = 0; i < strata->thresholds; i++)
        strata->limits[i] = (u8)(strata->by_bits ? strata->values[i] >> shift : strata->thresholds - i);
    u32 end = 256;
    for (u32 i = 0; i <= strata->thresholds; i++) {
        const u32 first = i < strata->thresholds ? strata->limits[i] : 0;
        strata->lowest[i] = (u8)first;
        strata->span[i] = (u8)(end - 1 - first);
        memset(strata->stratum_of + first, (int)i, end - first);
        end = first;
    }
}

#define DEFINE_KEYS(TYPE)                                                                                              \
    INLINE TYPE magnitude_##TYPE(const u8 *from) {                                                                     \
        TYPE x;                                                                                                        \
        memcpy(&x, from, sizeof x);                                                                                    \
        return (TYPE)(x & (TYPE)((TYPE)-1 >> 1));                                                                      \
    }                                                                                                                  \
    INLINE void keys_##TYPE(const Strata *strata, const u8 *from, size_t count, u8 *keys) {                            \
        if (strata->by_bits) {                                                                                         \
            for (size_t i = 0; i < count; i++)                                                                         \
                keys[i] = (u8)(magnitude_##TYPE(from + i * sizeof(TYPE)) >> KEY_SHIFT(TYPE));                          \
            return;                                                                                                    \
        }                                                                                                              \
        memset(keys, 0, count);                                                                                        \
        for (u32 t = 0; t < strata->thresholds; t++) {                                                                 \
            const TYPE value = (TYPE)strata->values[t];                                                                \
            for (size_t i = 0; i < count; i++)                                                                         \
                keys[i] = (u8)(keys[i] + (magnitude_##TYPE(from + i * sizeof(TYPE)) >= value));                        \
        }                                                                                                              \
    }
DEFINE_KEYS(u8)
DEFINE_KEYS(u16)
DEFINE_KEYS(u32)
DEFINE_KEYS(u64)

/* A chunk of a block: the keys, and how many members each stratum has before it and up to its end. */
typedef struct {
    u32 before[MAX_STRATA], after[MAX_STRATA];
    u8 keys[CHUNK];
} Chunk;

/* Go on to the next chunk, of `count` elements; the first comes after zeros. Give the strata, as bits, whose next rank
   lies in it. */
INLINE u32 look_at(const Strata *strata, const u8 *base, size_t first, size_t count, const u32 *next, Chunk *chunk,
                   Within within) {
    const u8 *from = base + (first << strata->log_width);
    u8 last[CHUNK * 8];
    if (count < CHUNK) { /* the loops have a fixed length */
        memset(last, 0, sizeof last);
        from = memcpy(last, from, count << strata->log_width);
    }
#define KEYS(LOG, TYPE) keys_##TYPE(strata, from, CHUNK, chunk->keys)
    BY_WIDTH(strata->log_width, KEYS)
    if (count < CHUNK)
        memset(chunk->keys + count, 255, CHUNK - count); /* no limit is above 255 */
    u32 outer = (u32)count, hits = 0, i = 0;
    for (; i < strata->thresholds; i++) {
        u32 inner = 0;
        for (u32 w = 0; w < WORDS; w++)
            inner += popcount(within(chunk->keys + 64 * w, 0, strata->limits[i] - 1));
        const u32 before = chunk->after[i], after = before + outer - inner;
        chunk->before[i] = before;
        chunk->after[i] = after;
        hits |= (u32)(next[i] < after) << i;
        outer = inner;
    }
    chunk->before[i] = chunk->after[i];
    chunk->after[i] += outer;
    return hits | (u32)(next[i] < chunk->after[i]) << i;
}

/* The members of a stratum among 64 elements; what is beyond the block's end counts as the outermost's. */
INLINE u64 members(const Strata *strata, const Chunk *chunk, u32 stratum, u32 word, Within within) {
    return within(chunk->keys + 64 * word, strata->lowest[stratum], strata->span[stratum]);
}

static u64 lower[CHUNK][WORDS]; /* the elements before one */

static void make_lower(void) {
    for (u32 in = 0; in < CHUNK; in++)
        for (u32 bit = 0; bit < in; bit++)
            lower[in][bit / 64] |= (u64)1 << bit % 64;
}

/* Give the stratum and the rank of each place; places rise, and all are below n. */
INLINE void rank_body(const Strata *strata, const u8 *base, size_t n, const u32 *places, size_t changes, u8 *stratum,
                      u32 *ranks, Within within) {
    Chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    for (size_t first = 0, j = 0; j < changes && first < n; first += CHUNK) {
        const size_t count = n - first < CHUNK ? n - first : CHUNK;
        look_at(strata, base, first, count, chunk.after, &chunk, within);
        for (; j < changes && places[j] - first < count; j++) { /* a place before this chunk wraps around */
            const u32 in = (u32)(places[j] - first), i = strata->stratum_of[chunk.keys[in]];
            u32 rank = chunk.before[i];
            for (u32 w = 0; w < WORDS; w++)
                rank += popcount(members(strata, &chunk, i, w, within) & lower[in][w]);
            stratum[j] = (u8)i;
            ranks[j] = rank;
        }
    }
}

/* Turn ranks into places; stratum i has those from starts[i] to starts[i + 1], rising. Give whether all exist. */
INLINE int select_body(const Strata *strata, const u8 *base, size_t n, const size_t *starts, u32 *ranks, Within within,
                       Select select) {
    Chunk chunk;
    size_t at[MAX_STRATA], left = starts[strata->thresholds + 1];
    u32 next[MAX_STRATA]; /* ranks; no population is as large as NO_RANK */
    memset(&chunk, 0, sizeof chunk);
    memcpy(at, starts, sizeof at);
    for (u32 i = 0; i <= strata->thresholds; i++)
        next[i] = at[i] < starts[i + 1] ? ranks[at[i]] : NO_RANK;
    for (size_t first = 0; left && first < n; first += CHUNK) {
        u32 hits = look_at(strata, base, first, n - first < CHUNK ? n - first : CHUNK, next, &chunk, within);
        for (; hits; hits &= hits - 1) {
            const u32 i = lowest(hits), end = chunk.after[i];
            u64 words[WORDS];
            u32 sums[WORDS], sum = chunk.before[i];
            for (u32 w = 0; w < WORDS; w++) {
                words[w] = members(strata, &chunk, i, w, within);
                sums[w] = sum;
                sum += popcount(words[w]);
            }
            size_t j = at[i];
            u32 rank = next[i];
            do {
                u32 w = 0;
                sum = sums[0];
                for (u32 v = 1; v < WORDS; v++) {
                    w = rank >= sums[v] ? v : w;
                    sum = rank >= sums[v] ? sums[v] : sum;
                }
                ranks[j++] = (u32)first + 64 * w + select(words[w], rank - sum);
                rank = j < starts[i + 1] ? ranks[j] : NO_RANK;
            } while (rank < end);
            left -= j - at[i];
            at[i] = j;
            next[i] = rank;
        }
    }
    return left == 0;
}

/* -- One of each per instruction set ---------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t (*diff)(const u8 *, const u8 *, size_t, u32, u32 *, size_t);
    void (*rank)(const Strata *, const u8 *, size_t, const u32 *, size_t, u8 *, u32 *);
    int (*select)(const Strata *, const u8 *, size_t, const size_t *, u32 *);
} Level;

#define DEFINE_LEVEL(NAME, TARGET)                                                                                     \
    TARGET static size_t diff_##NAME(const u8 *a, const u8 *b, size_t size, u32 log_width, u32 *places, size_t room) { \
        return diff_body(a, b, size, log_width, places, room, differ_##NAME);                                          \
    }                                                                                                                  \
    TARGET static void rank_##NAME(const Strata *strata, const u8 *base, size_t n, const u32 *places, size_t changes,  \
                                   u8 *stratum, u32 *ranks) {                                                          \
        rank_body(strata, base, n, places, changes, stratum, ranks, within_##NAME);                                     \
    }                                                                                                                  \
    TARGET static int select_in_##NAME(const Strata *strata, const u8 *base, size_t n, const size_t *starts,           \
                                       u32 *ranks) {                                                                   \
        return select_body(strata, base, n, starts, ranks, within_##NAME, select_##NAME);                               \
    }
#define LEVEL(NAME) {#NAME, diff_##NAME, rank_##NAME, select_in_##NAME}

DEFINE_LEVEL(portable, )
#ifdef AVX2
DEFINE_LEVEL(avx2, AVX2)
DEFINE_LEVEL(avx512, AVX512)
#endif
#ifdef NEON
DEFINE_LEVEL(neon, NEON)
#endif

static const Level LEVELS[] = { /* the fastest first */
#ifdef AVX2
    LEVEL(avx512), LEVEL(avx2),
#endif
#ifdef NEON
    LEVEL(neon),
#endif
    LEVEL(portable)};
#define LEVEL_COUNT (sizeof LEVELS / sizeof *LEVELS)

static const Level *level = NULL;

static int available(const Level *candidate) {
#ifdef AVX2
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("popcnt");
    if (!strcmp(candidate->name, "avx2"))
        return avx2;
    if (!strcmp(candidate->name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
#endif
    (void)candidate;
    return 1;
}

/* -- Estimates ------------------------------------------------------------------------------------------------------ */

#define LOG_SCALE 1024
static u16 log_table[256]; /* of 1 + i / 256 */

static void make_log_table(void) {
    for (u32 i = 0; i < 256; i++) {
        u64 x = ((u64)256 + i) << 23, log = 0; /* 1 is 2^31 */
        for (u32 bit = LOG_SCALE / 2; bit; bit /= 2) {
            x = x * x >> 31;
            log += x >> 32 ? bit : 0;
            x >>= x >> 32;
        }
        log_table[i] = (u16)log;
    }
}

INLINE u64 scaled_log2(u64 x) { /* as in estimates.py; x is below 2^32 */
    const u32 exponent = bit_length(x) - 1;
    return LOG_SCALE * (u64)exponent + log_table[(x << 8 >> exponent) & 255];
}

/* -- Thresholds: as in thresholds.py ------------------------------------------------------------------------------- */

#define SAMPLE (1 << 13)

typedef struct {
    u32 first, last, cut; /* classes of a stratum, and where to cut it; */
    u64 gain;             /* what that saves */
} Segment;

typedef struct {
    u64 changed[257], seen[257]; /* sums over the classes before */
    u64 stride;
} Classes;

INLINE u64 cost(const Classes *classes, u32 first, u32 last) {
    const u64 c = classes->changed[last] - classes->changed[first];
    u64 n = (classes->seen[last] - classes->seen[first]) * classes->stride;
    n = n > c ? n : c;
    return c ? c * (scaled_log2(n) - scaled_log2(c)) + 1477 * c * (2 * n - c) / (2 * n) : 0;
}

static void find_cut(const Classes *classes, Segment *segment) {
    const u64 whole = cost(classes, segment->first, segment->last);
    segment->gain = 0;
    for (u32 cut = segment->first + 1; cut < segment->last; cut++) {
        const u64 parts = cost(classes, segment->first, cut) + cost(classes, cut, segment->last);
        if (whole > parts && whole - parts > segment->gain) {
            segment->gain = whole - parts;
            segment->cut = cut;
        }
    }
}

/* The upper 8 bits of an element's magnitude, or all 7. */
INLINE u32 class_of(const u8 *base, size_t place, u32 log_width) {
    const u8 *end = base + ((place + 1) << log_width);
    return log_width ? load(end - 2, 2) >> 7 & 255 : end[-1] & 127;
}

INLINE void count_classes(const u8 *base, size_t n, u32 log_width, const u32 *places, size_t changes, size_t stride,
                          u32 changed[4][256], u32 seen[4][256]) { /* by four: equal ones need not wait for each other */
    for (size_t j = 0; j < changes; j++)
        changed[j % 4][class_of(base, places[j], log_width)]++;
    for (size_t j = 0, at = 0; at < n; at += stride)
        seen[j++ % 4][class_of(base, at, log_width)]++;
}

static void choose(Strata *strata, const u8 *base, size_t n, const u32 *places, size_t changes) {
    const u32 log_width = strata->log_width, shift = log_width ? (8u << log_width) - 9 : 0;
    const u64 least = LOG_SCALE * (8 * (((u64)1 << log_width) + 4) + changes / LEAST_GAIN);
    u32 changed[4][256] = {{0}}, seen[4][256] = {{0}}, keys[256], used = 0;
    Classes classes;
    classes.stride = n / SAMPLE | 1;
    if (log_width == 1)
        count_classes(base, n, 1, places, changes, (size_t)classes.stride, changed, seen);
    else
        count_classes(base, n, log_width, places, changes, (size_t)classes.stride, changed, seen);
    classes.changed[0] = classes.seen[0] = 0;
    for (u32 key = 0; key < 256; key++) {
        const u32 c = changed[0][key] + changed[1][key] + changed[2][key] + changed[3][key];
        const u32 s = seen[0][key] + seen[1][key] + seen[2][key] + seen[3][key];
        if (c || s) {
            keys[used++] = key;
            classes.changed[used] = classes.changed[used - 1] + c;
            classes.seen[used] = classes.seen[used - 1] + s;
        }
    }

    Segment segments[MAX_STRATA] = {{0, used, 0, 0}};
    u32 count = 1;
    find_cut(&classes, segments);
    while (count <= MAX_THRESHOLDS) {
        u32 best = 0;
        for (u32 i = 1; i < count; i++)
            if (segments[i].gain > segments[best].gain)
                best = i;
        if (segments[best].gain <= least)
            break;
        memmove(segments + best + 1, segments + best, (count - best) * sizeof *segments);
        segments[best].last = segments[best + 1].first = segments[best].cut;
        find_cut(&classes, segments + best);
        find_cut(&classes, segments + best + 1);
        count++;
    }
    strata->thresholds = count - 1;
    for (u32 i = 1; i < count; i++)
        strata->values[count - 1 - i] = (u64)keys[segments[i].first] << shift;
    prepare(strata);
}

/* -- Gaps ----------------------------------------------------------------------------------------------------------- */

static u64 estimate(const u32 *gaps, size_t count, u32 k) { /* as in sparse.py */
    u32 counts[4][ESCAPE + 1] = {{0}}; /* by four: equal ones need not wait for each other */
    for (size_t j = 0; j < count; j++) {
        const u32 quotient = gaps[j] >> k;
        counts[j % 4][quotient < ESCAPE ? quotient : ESCAPE]++;
    }
    const u64 log_count = scaled_log2(count);
    u64 bits = LOG_SCALE * (u64)count * k;
    for (u32 q = 0; q <= ESCAPE; q++) {
        const u64 found = (u64)counts[0][q] + counts[1][q] + counts[2][q] + counts[3][q];
        if (found)
            bits += found * (log_count - scaled_log2(found) + (q == ESCAPE ? LOG_SCALE * 32 : 0));
    }
    return bits;
}

INLINE int64_t log_of(u64 numerator, u64 denominator) {
    return (int64_t)scaled_log2(numerator) - (int64_t)scaled_log2(denominator);
}

INLINE u32 k_for(int64_t typical, int64_t target) {
    const int64_t above = typical - target + LOG_SCALE / 2;
    return above > 0 ? (u32)(above / LOG_SCALE) : 0;
}

static u32 choose_k(const u32 *gaps, size_t count, int64_t mean, int64_t target) {
    u32 sample[32], size = 0;
    const size_t stride = count / 16 ? count / 16 : 1;
    for (size_t j = 0; j < count; j += stride) {
        u32 at = size++;
        for (; at && sample[at - 1] > gaps[j]; at--)
            sample[at] = sample[at - 1];
        sample[at] = gaps[j];
    }
    const u32 a = k_for(mean, target), b = k_for(log_of(3 * (u64)sample[size / 2] + 1, 2), target);
    if (a < b + 2 && b < a + 2)
        return a;
    return estimate(gaps, count, a) <= estimate(gaps, count, b) ? a : b;
}

/* One k for each stratum, as in sparse.py; gaps of all strata follow each other. */
static void choose_ks(const u32 *gaps, const u64 *counts, size_t total, u32 *ks) {
    int64_t means[MAX_STRATA], target = LOG_SCALE * 3;
    size_t at = 0;
    for (u32 i = 0; i < MAX_STRATA; i++)
        if (counts[i]) {
            u64 sum = 0;
            for (const size_t end = at + counts[i]; at < end; at++)
                sum += gaps[at];
            means[i] = log_of(2 * sum + counts[i], 2 * (u64)counts[i]);
            if (16 * counts[i] >= total && means[i] < target)
                target = means[i];
        }
    if (target < LOG_SCALE * 3 / 2)
        target = LOG_SCALE * 3 / 2;
    at = 0;
    for (u32 i = 0; i < MAX_STRATA; at += counts[i++])
        ks[i] = counts[i] ? choose_k(gaps + at, counts[i], means[i], target) : 0;
}

static u8 *put_low_bits(const u32 *gaps, size_t count, u32 k, u8 *to) { /* may write 8 bytes beyond their end */
    u64 bits = 0;
    u32 used = 0;
    for (size_t j = 0; j < count && k; j++) {
        bits |= (gaps[j] & (((u64)1 << k) - 1)) << used;
        memcpy(to, &bits, 8);
        used += k;
        to += used / 8;
        bits >>= used / 8 * 8;
        used %= 8;
    }
    return to + (used > 0);
}

/* -- Differences ---------------------------------------------------------------------------------------------------- */

#define DEFINE_DIFFERENCES(TYPE)                                                                                       \
    INLINE u8 signs_##TYPE(const TYPE *d, size_t count) {                                                              \
        u8 signs = 0;                                                                                                  \
        for (size_t j = 0; j < count; j++)                                                                             \
            signs |= (u8)((d[j] >> (8 * sizeof(TYPE) - 1)) << j);                                                      \
        return signs;                                                                                                  \
    }                                                                                                                  \
    static void split_##TYPE(const void *from, size_t count, u8 *signs, u8 *const *planes) { /* of |d| - 1 */          \
        const TYPE *d = from;                                                                                          \
        for (u32 plane = 0; plane < sizeof(TYPE); plane++) {                                                           \
            u8 *restrict to = planes[plane];                                                                           \
            for (size_t j = 0; j < count; j++) {                                                                       \
                const TYPE negative = (TYPE)-(TYPE)(d[j] >> (8 * sizeof(TYPE) - 1));                                   \
                to[j] = (u8)((TYPE)((TYPE)(d[j] ^ negative) - 1 - negative) >> 8 * plane);                             \
            }                                                                                                          \
        }                                                                                                              \
        for (; count >= 8; count -= 8, d += 8)                                                                         \
            *signs++ = signs_##TYPE(d, 8);                                                                             \
        if (count)                                                                                                     \
            *signs = signs_##TYPE(d, count);                                                                           \
    }                                                                                                                  \
    INLINE TYPE join_some_##TYPE(const u8 *const *planes, size_t at, size_t count, u8 signs, TYPE *d) {                \
        TYPE bad = 0;                                                                                                  \
        for (size_t j = 0; j < count; j++) {                                                                           \
            TYPE value = 0;                                                                                            \
            for (u32 plane = 0; plane < sizeof(TYPE); plane++)                                                         \
                value |= (TYPE)((TYPE)planes[plane][at + j] << 8 * plane);                                             \
            const TYPE positive = ~(signs >> j) & 1;                                                                   \
            bad |= (TYPE)(value > (TYPE)(((TYPE)-1 >> 1) - positive));                                                 \
            d[at + j] = (TYPE)((value ^ (TYPE)(positive - 1)) + positive); /* ~(|d| - 1) is -|d| */                    \
        }                                                                                                              \
        return bad;                                                                                                    \
    }                                                                                                                  \
    static int join_##TYPE(const u8 *const *planes, size_t count, const u8 *signs, void *to) { /* all are in range */  \
        TYPE bad = 0;                                                                                                  \
        size_t at = 0;                                                                                                 \
        for (; at + 8 <= count; at += 8)                                                                               \
            bad |= join_some_##TYPE(planes, at, 8, *signs++, to);                                                      \
        return !(at < count ? bad | join_some_##TYPE(planes, at, count - at, *signs, to) : bad);                       \
    }
DEFINE_DIFFERENCES(u8)
DEFINE_DIFFERENCES(u16)
DEFINE_DIFFERENCES(u32)
DEFINE_DIFFERENCES(u64)

/* Differences and ranks, in the order of strata. */
INLINE void scatter(const u8 *new, const u8 *base, u32 log_width, const u32 *places, const u8 *stratum, const u32 *ranks,
                    size_t changes, size_t *to, u32 *sorted, u8 *differences) {
    for (size_t j = 0; j < changes; j++) {
        const size_t at = to[stratum[j]]++, from = (size_t)places[j] << log_width;
        sorted[at] = ranks[j];
        store_element(differences + (at << log_width), log_width,
                      load_element(new + from, log_width) - load_element(base + from, log_width));
    }
}

enum How { ADD, SUBTRACT, COPY };

/* Change the elements at places, by differences or to those of another block; give whether all are inside. */
INLINE int change_body(u8 *block, size_t n, const u8 *places, size_t changes, const u8 *from, u32 log_width,
                       enum How how) {
    for (size_t j = 0; j < changes; j++) {
        const size_t place = (size_t)load(places + 4 * j, 4);
        if (place >= n)
            return 0;
        u8 *at = block + (place << log_width);
        const u64 old = load_element(at, log_width);
        const u64 x = load_element(from + ((how == COPY ? place : j) << log_width), log_width);
        store_element(at, log_width, how == COPY ? x : how == ADD ? old + x : old - x);
    }
    return 1;
}

static int change(u8 *block, size_t n, const u8 *places, size_t changes, const u8 *from, int log_width, enum How how) {
    int inside;
#define CHANGE(LOG, TYPE) inside = change_body(block, n, places, changes, from, LOG, how)
    BY_WIDTH(log_width, CHANGE)
    return inside;
}

/* What a payload may break, as the numbers that `decode` gives; 0 is none. */
enum { FINE, SMALL_ESCAPE, LOW_PADDING, NO_SUCH_RANK, SIGN_PADDING, OUT_OF_RANGE };

typedef struct {
    const u8 *quotients, *escapes, *lows, *signs, *planes[8];
    size_t escapes_size, lows_size, escapes_used, lows_used;
} Streams;

/* Read the ranks of one stratum, from `at` to `end`. */
static int take_ranks(Streams *in, size_t at, size_t end, u32 k, size_t n, u32 *ranks) {
    const size_t bits = (end - at) * k, size = (bits + 7) / 8;
    const u8 *lows = in->lows + in->lows_used;
    const size_t room = in->lows_size - in->lows_used; /* bytes that may be read; at least `size` */
    in->lows_used += size;
    if (bits % 8 && lows[size - 1] >> bits % 8)
        return LOW_PADDING;
    u64 next = 0; /* the lowest rank that may follow; at most n */
    for (size_t bit = 0; at < end; at++, bit += k) {
        u64 gap = in->quotients[at];
        if (gap == ESCAPE) {
            if (in->escapes_used == in->escapes_size) /* who writes to the buffer meanwhile gains nothing */
                return SMALL_ESCAPE;
            gap = load(in->escapes + in->escapes_used, 4);
            in->escapes_used += 4;
        }
        gap <<= k;
        if (k) {
            const size_t byte = bit / 8, have = room - byte;
            const u64 word = have < 8 ? load(lows + byte, have) : load(lows + byte, 8);
            gap |= word >> bit % 8 & (((u64)1 << k) - 1);
        }
        if (gap >= n - next)
            return NO_SUCH_RANK;
        ranks[at] = (u32)(next + gap);
        next += gap + 1;
    }
    return FINE;
}

/* -- Python ----------------------------------------------------------------------------------------------------------- */

static int log_width_of(int width, Py_ssize_t size) {
    for (int i = 0; i < 4; i++)
        if (width == 1 << i && size % width == 0 && size / width <= UINT32_MAX)
            return i;
    PyErr_SetString(PyExc_ValueError, "elements of this width do not fill the block");
    return -1;
}

static PyObject *released(PyObject *result, Py_buffer *buffers, int count) {
    while (count)
        PyBuffer_Release(&buffers[--count]);
    return result;
}

/* To take the GIL again may cost a thread 100 microseconds, where others want it: work of fewer than 10 keeps it. */
#define SMALL (1 << 16) /* bytes */

INLINE PyThreadState *release_gil(size_t bytes) { return bytes > SMALL ? PyEval_SaveThread() : NULL; }
INLINE void take_gil(PyThreadState *state) { state ? PyEval_RestoreThread(state) : (void)0; }

static int refuse(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

static int read_thresholds(const Py_buffer *from, int log_width, Strata *strata) {
    const size_t width = (size_t)1 << log_width, count = (size_t)from->len / width;
    if (count > MAX_THRESHOLDS || (size_t)from->len % width)
        return refuse("these are not thresholds");
    strata->log_width = (u32)log_width;
    strata->thresholds = (u32)count;
    for (size_t i = 0; i < count; i++) {
        const u64 value = strata->values[i] = load((const u8 *)from->buf + i * width, width);
        if (value == 0 || value > ~(u64)0 >> (65 - 8 * width) || (i && value >= strata->values[i - 1]))
            return refuse("thresholds do not fall");
    }
    prepare(strata);
    return 0;
}

PyDoc_STRVAR(diff_doc, "diff(new, base, width, places) -> count\n\nPut the places of elements that differ, rising, into "
                       "an array of u32, as far as it has room; give how many there are.");

static PyObject *py_diff(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[3], *new = &b[0], *base = &b[1], *places = &b[2];
    int width, log_width;
    size_t count = 0;
    if (!PyArg_ParseTuple(args, "y*y*iw*:diff", new, base, &width, places))
        return NULL;
    if ((log_width = log_width_of(width, new->len)) >= 0 && new->len == base->len && (uintptr_t)places->buf % 4 == 0) {
        PyThreadState *const state = release_gil((size_t)new->len / 2);
        count = level->diff(new->buf, base->buf, (size_t)new->len, (u32)log_width, places->buf, (size_t)places->len / 4);
        take_gil(state);
    } else if (log_width >= 0)
        log_width = refuse("the blocks differ in length, or the places are not aligned");
    return released(log_width < 0 ? NULL : PyLong_FromSize_t(count), b, 3);
}

/* Memory that the next call may use, guarded by the GIL: to have it from the system anew costs more than the work. */
#define SPARES 4
#define SPARE_SIZE ((size_t)5 << 18)
static u8 *spares[SPARES];

static u8 *take_memory(size_t size) {
    for (u8 **spare = spares; spare < spares + SPARES && size <= SPARE_SIZE; spare++)
        if (*spare) {
            u8 *found = *spare;
            *spare = NULL;
            return found;
        }
    return malloc(size < SPARE_SIZE ? SPARE_SIZE : size);
}

static void give_memory(u8 *memory, size_t size) {
    for (u8 **spare = spares; spare < spares + SPARES && size <= SPARE_SIZE; spare++)
        if (!*spare) {
            *spare = memory;
            return;
        }
    free(memory);
}

typedef struct {
    u8 *differences, *stratum, ks[MAX_STRATA], *streams[4 + 8]; /* quotients, escapes, lows, signs, planes */
    u32 *places, *ranks, *gaps;
    u64 counts[MAX_STRATA];
    size_t sizes[3], used; /* of escapes and lows; and of ks */
} Encoded;

static void encode(const Strata *strata, const u8 *new, const u8 *base, size_t n, size_t changes, Encoded *out) {
    size_t to[MAX_STRATA] = {0};
    u32 ks[MAX_STRATA], *gaps = out->gaps, *sorted;
    memset(out->stratum, 0, changes);
    if (strata->thresholds)
        level->rank(strata, base, n, out->places, changes, out->stratum, out->ranks);
    else
        memcpy(out->ranks, out->places, changes * sizeof *gaps);
    for (size_t j = 0; j < changes; j++)
        out->counts[out->stratum[j]]++;
    for (u32 i = 1; i <= strata->thresholds; i++)
        to[i] = to[i - 1] + out->counts[i - 1];
#define SCATTER(LOG, TYPE)                                                                                             \
    scatter(new, base, LOG, out->places, out->stratum, out->ranks, changes, to, gaps, out->differences);               \
    split_##TYPE(out->differences, changes, out->streams[3], out->streams + 4)
    BY_WIDTH(strata->log_width, SCATTER)
    sorted = memcpy(out->ranks, gaps, changes * sizeof *gaps);
    for (u32 i = 0; i <= strata->thresholds; sorted += out->counts[i], gaps += out->counts[i], i++) {
        if (out->counts[i])
            gaps[0] = sorted[0];
        for (size_t j = 1; j < out->counts[i]; j++)
            gaps[j] = sorted[j] - sorted[j - 1] - 1;
    }
    gaps = out->gaps;

    u8 *quotients = out->streams[0], *escapes = out->streams[1], *lows = out->streams[2];
    choose_ks(gaps, out->counts, changes, ks);
    for (u32 i = 0; i <= strata->thresholds; i++) {
        const size_t count = out->counts[i];
        const u32 k = ks[i];
        if (count)
            out->ks[out->used++] = (u8)k;
        u32 most = 0;
        for (size_t j = 0; j < count; j++) {
            const u32 quotient = gaps[j] >> k;
            quotients[j] = (u8)(quotient < ESCAPE ? quotient : ESCAPE);
            most |= quotient;
        }
        for (size_t j = 0; j < count && most >= ESCAPE; j++)
            if (quotients[j] == ESCAPE) {
                const u32 quotient = gaps[j] >> k;
                memcpy(escapes, &quotient, 4);
                escapes += 4;
            }
        lows = put_low_bits(gaps, count, k, lows);
        quotients += count;
        gaps += count;
    }
    out->sizes[1] = (size_t)(escapes - out->streams[1]);
    out->sizes[2] = (size_t)(lows - out->streams[2]);
}

#define ROUNDED(CHANGES) (((CHANGES) + 7) / 8 * 8)
#define MEMORY_FOR(CHANGES, WIDTH) (ROUNDED(CHANGES) * (2 * (WIDTH) + 23) + 64)
static void lay_out(Encoded *out, u8 *memory, size_t changes, size_t width) {
    const size_t rounded = ROUNDED(changes);
    out->differences = memory;
    out->places = (u32 *)(memory + rounded * width);
    out->ranks = out->places + rounded;
    out->gaps = out->ranks + rounded;
    out->stratum = (u8 *)(out->gaps + rounded);
    u8 *stream = out->stratum + rounded;
    for (size_t i = 0; i < 4 + width; i++) { /* each stratum's low bits are rounded up, and 8 bytes beyond written */
        out->streams[i] = stream;
        stream += i == 1 || i == 2 ? 4 * rounded + 32 : rounded;
    }
}

static PyObject *encoded_tuple(Encoded *out, const Strata *strata, size_t changes, int given) {
    const u32 log_width = strata->log_width, width = 1 << log_width;
    u8 thresholds[8 * MAX_THRESHOLDS + 8];
    for (u32 i = 0; i < strata->thresholds; i++)
        store_element(thresholds + (i << log_width), log_width, strata->values[i]);
    PyObject *streams = PyList_New(0);
    for (u32 i = 0; streams && changes && i < 4 + width; i++) {
        const size_t size = i == 1 || i == 2 ? out->sizes[i] : i == 3 ? (changes + 7) / 8 : changes;
        PyObject *stream = PyBytes_FromStringAndSize((const char *)out->streams[i], (Py_ssize_t)size);
        if (!stream || PyList_Append(streams, stream))
            Py_CLEAR(streams);
        Py_XDECREF(stream);
    }
    if (!streams)
        return NULL;
    return Py_BuildValue("y#y#y#y#N", (const char *)out->places, (Py_ssize_t)(given ? 0 : 4 * changes),
                         (const char *)thresholds, (Py_ssize_t)(strata->thresholds << log_width),
                         (const char *)out->counts, (Py_ssize_t)((strata->thresholds + 1) * sizeof *out->counts),
                         (const char *)out->ks, (Py_ssize_t)out->used, streams);
}

PyDoc_STRVAR(encode_doc, "encode(new, base, width, places, thresholds) -> places, thresholds, counts, ks, streams\n\nMake "
                         "the parts of a payload from the places (u32) that differ, which are found if None, else not given "
                         "back, and thresholds, chosen if None. Counts are u64; streams are quotients, escapes, low bits, "
                         "signs and planes, or none where nothing differs.");

static PyObject *py_encode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[4], *new = &b[0], *base = &b[1], *places = &b[2], *thresholds = &b[3];
    Strata strata;
    Encoded out = {0};
    PyObject *result = NULL;
    int width, log_width, rising = 1;
    if (!PyArg_ParseTuple(args, "y*y*iz*z*:encode", new, base, &width, places, thresholds))
        return NULL;
    const int given = places->obj != NULL;
    if ((log_width = log_width_of(width, new->len)) < 0 || read_thresholds(thresholds, log_width, &strata) < 0)
        return released(NULL, b, 4);
    const size_t n = (size_t)new->len >> log_width;
    size_t changes = (size_t)places->len / 4, room = given ? changes : (size_t)new->len / 32 + 64;
    if (new->len != base->len || (given && (places->len % 4 || !changes || changes > n)))
        return refuse("the blocks differ in length, or there is no change, or more than elements"), released(NULL, b, 4);
    for (;; room = changes) { /* again where more differ than there was room for */
        const size_t size = MEMORY_FOR(room, (size_t)width);
        u8 *memory = take_memory(size);
        if (!memory)
            return PyErr_NoMemory(), released(NULL, b, 4);
        lay_out(&out, memory, room, (size_t)width);
        PyThreadState *const state = release_gil((size_t)new->len + 8 * room);
        if (given) {
            memcpy(out.places, places->buf, 4 * changes);
            for (size_t j = 1; j < changes; j++)
                rising &= out.places[j - 1] < out.places[j];
            rising &= out.places[changes - 1] < n;
        } else
            changes = level->diff(new->buf, base->buf, (size_t)new->len, (u32)log_width, out.places, room);
        if (rising && changes && changes <= room) {
            if (!thresholds->obj && changes >= LEAST_CHANGES)
                choose(&strata, base->buf, n, out.places, changes);
            encode(&strata, new->buf, base->buf, n, changes, &out);
        }
        take_gil(state);
        if (rising && changes <= room)
            result = encoded_tuple(&out, &strata, changes, given);
        give_memory(memory, size);
        if (changes <= room)
            break;
    }
    if (!rising)
        refuse("the places do not rise, or one is outside the block");
    return released(result, b, 4);
}

static int decode(const Strata *strata, const u8 *base, size_t n, const u64 *counts, const u8 *ks, Streams *in,
                  u32 *places, u8 *differences) {
    size_t starts[MAX_STRATA + 1] = {0};
    for (size_t j = 0; j < in->escapes_size; j += 4)
        if (load(in->escapes + j, 4) < ESCAPE)
            return SMALL_ESCAPE;
    for (u32 i = 0; i <= strata->thresholds; i++) {
        starts[i + 1] = starts[i] + (size_t)counts[i];
        const int broken = take_ranks(in, starts[i], starts[i + 1], ks[i], n, places);
        if (broken)
            return broken;
    }
    if (strata->thresholds && !level->select(strata, base, n, starts, places))
        return NO_SUCH_RANK;
    const size_t total = starts[strata->thresholds + 1];
    if (total % 8 && in->signs[total / 8] >> total % 8)
        return SIGN_PADDING;
    int fine;
#define JOIN(LOG, TYPE) fine = join_##TYPE(in->planes, total, in->signs, differences)
    BY_WIDTH(strata->log_width, JOIN)
    return fine ? FINE : OUT_OF_RANGE;
}

PyDoc_STRVAR(decode_doc,
             "decode(base, width, thresholds, counts, ks, content, places, differences, apply) -> rule\n\nUndo `encode`: "
             "put places (u32) and differences, stratum by stratum, into arrays that have exactly the room, and add them to "
             "the base if `apply`. Counts are u64, and ks bytes, one for each stratum; the content is that of all streams. "
             "The result is 0, or the rule that is broken, and then the base is as it was: 1 an escape is below 255, 2 padding "
             "of low bits, 3 a rank is not below its stratum's population, 4 padding of signs, 5 a difference is out of range.");

static PyObject *py_decode(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer b[7], *base = &b[0], *given = &b[1], *counts = &b[2], *ks = &b[3], *content = &b[4], *places = &b[5],
                    *differences = &b[6];
    Strata strata;
    Streams in = {0};
    u64 count[MAX_STRATA], total = 0;
    u8 k[MAX_STRATA];
    int width, log_width, apply, rule = -1;
    PyObject *block;
    if (!PyArg_ParseTuple(args, "Oiy*y*y*y*w*w*p:decode", &block, &width, given, counts, ks, content, places, differences,
                          &apply))
        return NULL;
    if (PyObject_GetBuffer(block, base, apply ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return released(NULL, b + 1, 6);
    if ((log_width = log_width_of(width, base->len)) < 0 || read_thresholds(given, log_width, &strata) < 0)
        return released(NULL, b, 7);
    const size_t n = (size_t)base->len >> log_width, groups = (size_t)strata.thresholds + 1;
    int fits = (size_t)counts->len == 8 * groups && (size_t)ks->len == groups;
    for (size_t i = 0; fits && i < groups; i++) {
        count[i] = load((const u8 *)counts->buf + 8 * i, 8);
        k[i] = ((const u8 *)ks->buf)[i];
        fits = count[i] <= n && (total += count[i]) <= n && k[i] <= MAX_K;
        in.lows_size += fits ? (size_t)(count[i] * k[i] + 7) / 8 : 0;
    }
    const size_t changes = (size_t)total, signs = (changes + 7) / 8;
    fits = fits && changes && (size_t)content->len >= changes && (size_t)places->len == 4 * changes &&
           (uintptr_t)places->buf % 4 == 0 && (uintptr_t)differences->buf % (size_t)width == 0 &&
           (size_t)differences->len == changes << log_width;
    if (fits) {
        PyThreadState *const state = release_gil((size_t)base->len / 2 + 8 * changes);
        in.quotients = content->buf;
        for (size_t j = 0; j < changes; j++)
            in.escapes_size += in.quotients[j] == ESCAPE ? 4 : 0;
        in.escapes = in.quotients + changes;
        in.lows = in.escapes + in.escapes_size;
        in.signs = in.lows + in.lows_size;
        for (int plane = 0; plane < width; plane++)
            in.planes[plane] = in.signs + signs + (size_t)plane * changes;
        if ((size_t)content->len == changes + in.escapes_size + in.lows_size + signs + (size_t)width * changes)
            rule = decode(&strata, base->buf, n, count, k, &in, places->buf, differences->buf);
        if (rule == FINE && apply && !change(base->buf, n, places->buf, changes, differences->buf, log_width, ADD))
            rule = NO_SUCH_RANK; /* somebody writes to the places meanwhile */
        take_gil(state);
    }
    if (rule < 0)
        refuse("a stream or an array has not the size that the counts say, or there is none, or a k is above 26");
    return released(rule < 0 ? NULL : PyLong_FromLong(rule), b, 7);
}

static PyObject *changed(PyObject *args, int copy) {
    Py_buffer b[3], *block = &b[0], *places = &b[1], *from = &b[2];
    int width, log_width, undo = 0, inside = 1;
    if (!(copy ? PyArg_ParseTuple(args, "w*y*iy*:copy", block, from, &width, places)
               : PyArg_ParseTuple(args, "w*iy*y*p:apply", block, &width, places, from, &undo)))
        return NULL;
    const size_t changes = (size_t)places->len / 4;
    log_width = log_width_of(width, block->len);
    if (log_width >= 0 && (size_t)from->len == (copy ? (size_t)block->len : changes << log_width)) {
        PyThreadState *const state = release_gil(8 * changes);
        inside = change(block->buf, (size_t)block->len >> log_width, places->buf, changes, from->buf, log_width,
                        copy ? COPY : undo ? SUBTRACT : ADD);
        take_gil(state);
        if (!inside)
            log_width = refuse("a place is outside the block");
    } else if (log_width >= 0)
        log_width = refuse("there are not as many differences as places, or elements as in the block");
    return released(log_width < 0 ? NULL : Py_NewRef(Py_None), b, 3);
}

PyDoc_STRVAR(apply_doc, "apply(block, width, places, differences, undo)\n\nAdd the differences to the elements at places "
                        "(u32), or subtract them.");

static PyObject *py_apply(PyObject *self, PyObject *args) {
    (void)self;
    return changed(args, 0);
}

PyDoc_STRVAR(copy_doc, "copy(block, new, width, places)\n\nCopy the elements at places (u32) from a new block.");

static PyObject *py_copy(PyObject *self, PyObject *args) {
    (void)self;
    return changed(args, 1);
}

PyDoc_STRVAR(levels_doc, "levels() -> names\n\nThe instruction sets that this CPU has kernels for; the fastest first.");

static PyObject *py_levels(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < LEVEL_COUNT; i++)
        if (available(&LEVELS[i])) {
            PyObject *name = PyUnicode_FromString(LEVELS[i].name);
            if (!name || PyList_Append(names, name))
                Py_CLEAR(names);
            Py_XDECREF(name);
        }
    return names;
}

PyDoc_STRVAR(level_doc, "level(name=None) -> name\n\nThe instruction set in use; another one after its name was given.");

static const Level *find_level(const char *name) {
    for (size_t i = 0; i < LEVEL_COUNT; i++)
        if ((!name || !strcmp(name, LEVELS[i].name)) && available(&LEVELS[i]))
            return &LEVELS[i];
    return NULL;
}

static PyObject *py_level(PyObject *self, PyObject *args) {
    (void)self;
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|z:level", &name))
        return NULL;
    const Level *found = name ? find_level(name) : level;
    if (!found)
        return PyErr_Format(PyExc_ValueError, "this CPU has no kernels called %s", name);
    level = found;
    return PyUnicode_FromString(level->name);
}

static PyMethodDef METHODS[] = {{"diff", py_diff, METH_VARARGS, diff_doc},
                                {"encode", py_encode, METH_VARARGS, encode_doc},
                                {"decode", py_decode, METH_VARARGS, decode_doc},
                                {"apply", py_apply, METH_VARARGS, apply_doc},
                                {"copy", py_copy, METH_VARARGS, copy_doc},
                                {"levels", py_levels, METH_NOARGS, levels_doc},
                                {"level", py_level, METH_VARARGS, level_doc},
                                {NULL, NULL, 0, NULL}};

static int start(PyObject *module) {
    (void)module;
    make_log_table();
    make_lower();
    const char *wanted = getenv("DELTAFORMAT_NATIVE");
    if (wanted && (!*wanted || !strcmp(wanted, "1")))
        wanted = NULL;
    level = find_level(wanted);
    if (level)
        return 0;
    PyErr_Format(PyExc_ImportError, "DELTAFORMAT_NATIVE=%s: %s", wanted,
                 strcmp(wanted, "0") ? "this CPU has no such kernels" : "switched off");
    return -1;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "deltaformat._native", "Kernels of the sparse codec.", 0,
                                    METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
