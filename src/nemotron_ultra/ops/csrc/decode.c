/* A few tokens of every row through consecutive layers, float32, weights read once where they lie.
 *
 * A call is one parallel region. Each phase of a layer is divided into pieces (rows of a weight matrix, a
 * sequence and group, a slice of every expert) that write different memory; threads take piece after piece and
 * go on when all are done, so that a thread which the system holds up delays nobody until it has a piece. The
 * arithmetic is that of ops/step.py, ops/routing.py and ops/experts.py but for the order of
 * sums. Structures have their twins in ops/decode_kernels.py. Functions for others are named nu_..., since C
 * libraries share their names.
 *
 * x [rows, D] is the residual stream, a row being token k of sequence b: row = b * tokens + k.
 */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define MOST_ROWS 256
#define AT_ONCE 128 /* layers of a parallel region, and of a module that drafts */

enum { MAMBA, ATTENTION, MOE, MLP };

typedef struct {
    const void *data;                      /* [outs, k] float, or int8 where there is a scale; NULL: no matrix */
    const float *scale, *bias;             /* of each row; NULL: none */
    int64_t outs;
} Matrix;

typedef struct {
    int64_t kind;
    const float *norm;
    float eps;
    /* Mamba: in_proj, out_proj. Attention: q, k, v, out. MoE: router, latent down, latent up, shared up,
     * shared down. MLP: up, down. */
    Matrix w[8];
    Matrix expert_up, expert_down;         /* of all experts, one below the other */
    const float *conv, *conv_bias, *a_log, *skip, *dt_bias, *gate_norm;
    float dt_low, dt_high;
    float *window, *state;                 /* [slots, K - 1, C], [slots, G, N, X] */
    float *full, *u, *b, *log_decay;       /* what a commit needs; NULL: this layer is not to be committed */
    float *key, *value;                    /* [slots, G, capacity, P] */
    int64_t capacity;
    int64_t heads, head_dim, groups, columns, taps;
    const float *correction;
    int64_t experts, chosen, expert_hidden, expert_width, normalise;
    float factor;
} Layer;

typedef struct {
    float *x;
    int64_t batch, tokens, width;
    int64_t waits;                         /* whether states wait for a commit; else they move at once */
    int64_t *length;                       /* tokens that each sequence has seen, [batch] */
    float *normed, *wide, *narrow, *hidden, *mixed, *scratch;
    int64_t normed_size, scratch_size;     /* floats a thread */
} Work;

#define PHASES 4
#define PIECES 4 /* a thread and phase */

typedef struct {
    _Alignas(64) atomic_long next;
    _Alignas(64) atomic_long done;
} Phase;

typedef struct {
    int64_t pieces; /* of a phase that is divided by rows of a matrix */
    Phase *phase;   /* of the current layer */
} Team;

static void wait_for(Phase *phase, int64_t pieces) {
    for (int spin = 0; atomic_load(&phase->done) < pieces; spin++) {
        if (spin > 500) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
        else __builtin_ia32_pause();
#endif
    }
}

/* The body runs with piece = 0 .. pieces - 1, each once in some thread; afterwards all of them are done. */
#define PHASE(number, pieces, body)                                                                       \
    do {                                                                                                  \
        Phase *phase_ = team->phase + (number);                                                           \
        int64_t all_ = (pieces);                                                                          \
        for (int64_t piece; (piece = atomic_fetch_add(&phase_->next, 1)) < all_;) {                       \
            body                                                                                          \
            atomic_fetch_add(&phase_->done, 1);                                                           \
        }                                                                                                 \
        wait_for(phase_, all_);                                                                           \
    } while (0)

static inline void share(int64_t total, int64_t step, int64_t piece, int64_t pieces, int64_t *begin, int64_t *end) {
    int64_t blocks = (total + step - 1) / step;
    *begin = blocks * piece / pieces * step;
    *end = blocks * (piece + 1) / pieces * step;
    if (*end > total) *end = total;
}

/* exp to about one unit in the last place; NaN stays NaN. */
static inline float exp1(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t i; float f; } two = {(uint32_t)((int32_t)n + 127) << 23};
    return p * two.f;
}

static inline float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

/* Products run over LANES numbers at once, with WIDE_ROWS rows of x at most: their sums, four rows of the matrix
 * and one of x fill the registers. */
#ifdef __AVX512F__
#define LANES 16
#define WIDE_ROWS 6
#else
#define LANES 8
#define WIDE_ROWS 3
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vecu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float v4u __attribute__((vector_size(16), aligned(4), may_alias));

/* out[j] = sum of the numbers of a[j], for 1 or 4 of them. */
static inline void sums(const vec *a, int many, float *out) {
#if defined(__AVX512F__)
    if (many == 4) {
        __m512 a0 = (__m512)a[0], a1 = (__m512)a[1], a2 = (__m512)a[2], a3 = (__m512)a[3];
        __m512d low = (__m512d)(_mm512_unpacklo_ps(a0, a1) + _mm512_unpackhi_ps(a0, a1));
        __m512d high = (__m512d)(_mm512_unpacklo_ps(a2, a3) + _mm512_unpackhi_ps(a2, a3));
        __m512 all = (__m512)_mm512_unpacklo_pd(low, high) + (__m512)_mm512_unpackhi_pd(low, high);
        __m256 half = _mm512_castps512_ps256(all) + (__m256)_mm512_extractf64x4_pd((__m512d)all, 1);
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
        return;
    }
#elif defined(__AVX__)
    if (many == 4) {
        __m256 low = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]), high = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
        __m256 both = _mm256_hadd_ps(low, high);
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
        return;
    }
#endif
    for (int j = 0; j < many; j++) {
        out[j] = 0;
        for (int i = 0; i < LANES; i++) out[j] += a[j][i];
    }
}

/* out[i][j] = x_i . w_j for M rows x and R rows w of length k. The order of a sum does not depend on M.
 * next: what is read after w, fetched meanwhile: the lines of `fetch` rows. */
#ifdef __AVX512F__
#define HOLD(register) __asm__("" : "+v"(register)) /* one load, not one a product */
#else
#define HOLD(register)
#endif
#define SOON(address) __builtin_prefetch(address, 0, 2) /* into the second level, which waits for more at once */
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
#define TILE(M, R)                                                                                         \
    static void tile_##M##_##R(const float *const *x, const float *w, int64_t k, const float *next, int fetch, \
                               float out[WIDE_ROWS][4]) {                                                 \
        vec acc[M][R];                                                                                    \
        const float *in[M];                                                                               \
        UNROLL for (int i = 0; i < M; i++) in[i] = x[i];                                                  \
        UNROLL for (int i = 0; i < M; i++)                                                                \
            UNROLL for (int j = 0; j < R; j++) acc[i][j] = (vec){0};                                      \
        int64_t p = 0;                                                                                    \
        for (; p + LANES <= k; p += LANES) {                                                              \
            vec column[R];                                                                                \
            UNROLL for (int j = 0; j < R; j++) column[j] = *(const vecu *)(w + j * k + p);                \
            if (fetch)                                                                                    \
                for (int j = 0; j < 2; j++) SOON(next + j * k + p);                                       \
            if (fetch == 4)                                                                               \
                for (int j = 2; j < 4; j++) SOON(next + j * k + p);                                       \
            UNROLL for (int i = 0; i < M; i++) {                                                          \
                vec row = *(const vecu *)(in[i] + p);                                                     \
                HOLD(row);                                                                                \
                UNROLL for (int j = 0; j < R; j++) acc[i][j] += row * column[j];                          \
            }                                                                                             \
        }                                                                                                 \
        UNROLL for (int i = 0; i < M; i++) {                                                              \
            sums(acc[i], R, out[i]);                                                                      \
            for (int64_t t = p; t < k; t++)                                                               \
                for (int j = 0; j < R; j++) out[i][j] += in[i][t] * w[j * k + t];                         \
        }                                                                                                 \
    }
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(1, 1) TILE(2, 1) TILE(3, 1)
#if WIDE_ROWS == 6
TILE(4, 4) TILE(5, 4) TILE(6, 4) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#endif

typedef void Tile(const float *const *, const float *, int64_t, const float *, int, float[WIDE_ROWS][4]);
static Tile *const tiles[WIDE_ROWS][2] = {
    {tile_1_1, tile_1_4}, {tile_2_1, tile_2_4}, {tile_3_1, tile_3_4},
#if WIDE_ROWS == 6
    {tile_4_1, tile_4_4}, {tile_5_1, tile_5_4}, {tile_6_1, tile_6_4},
#endif
};

enum { STORE, RELU2, ADD, ADD_WEIGHED };

static inline void put(float *y, float value, int mode, float weight) {
    if (mode == STORE) *y = value;
    else if (mode == RELU2) { float r = value > 0 ? value : (value != value ? value : 0); *y = r * r; }
    else if (mode == ADD) *y += value;
    else *y += weight * value;
}

static inline void put4(float *y, const float *value, const float *bias, int mode, float weight) {
    v4u *to = (v4u *)y, v = *(const v4u *)value;
    if (bias) v += *(const v4u *)bias;
    if (mode == STORE) *to = v;
    else if (mode == RELU2) { v4u r = (v4u)(((v > 0) | (v != v)) & (__typeof__(v > 0))v); *to = r * r; }
    else if (mode == ADD) *to += v;
    else *to += weight * v;
}

/* Where the products of a row of x go: y[n] (mode) out + bias[n]. */
static inline void put_all(float *y, const float *out, int r, const float *bias, int mode, float weight) {
    if (r == 4) put4(y, out, bias, mode, weight);
    else put(y, out[0] + (bias ? bias[0] : 0), mode, weight);
}

/* out[j] = sum of q[p] * w[row j][p], bytes in -127..127, of the BYTE_ROWS rows in `row`. next: a row that is
 * fetched meanwhile, with those below it. */
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define BYTE_ROWS 16
static inline void byte_sums(const int8_t *q, const int8_t *const *row, int64_t k, const int8_t *next, float *out) {
    __m512i sum[16];
    UNROLL16 for (int j = 0; j < 16; j++) sum[j] = _mm512_setzero_si512();
    for (int64_t p = 0; p < k; p += 64) {
        __mmask64 there = k - p >= 64 ? ~0ull : ~0ull >> (64 - (k - p));
        __m512i here = _mm512_maskz_loadu_epi8(there, q + p), size = _mm512_abs_epi8(here);
        __mmask64 below = _mm512_movepi8_mask(here);
        UNROLL16 for (int j = 0; j < 16; j++) {
            __m512i w = _mm512_maskz_loadu_epi8(there, row[j] + p);
            sum[j] = _mm512_dpbusd_epi32(sum[j], size, _mm512_mask_sub_epi8(w, below, _mm512_setzero_si512(), w));
            SOON(next + j * k + p);
        }
    }
    UNROLL16 for (int j = 0; j < 16; j += 2)
        sum[j / 2] = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[j], sum[j + 1]),
                                      _mm512_unpackhi_epi32(sum[j], sum[j + 1]));
    UNROLL for (int j = 0; j < 8; j += 2)
        sum[j / 2] = _mm512_add_epi32(_mm512_unpacklo_epi64(sum[j], sum[j + 1]),
                                      _mm512_unpackhi_epi64(sum[j], sum[j + 1]));
    for (int many = 4; many > 1; many /= 2)
        for (int j = 0; j < many; j += 2)
            sum[j / 2] = _mm512_add_epi32(_mm512_shuffle_i32x4(sum[j], sum[j + 1], 0x88),
                                          _mm512_shuffle_i32x4(sum[j], sum[j + 1], 0xdd));
    _mm512_storeu_ps(out, _mm512_cvtepi32_ps(sum[0]));
}
#elif defined(__AVX2__)
#define BYTE_ROWS 8
static inline void byte_sums(const int8_t *q, const int8_t *const *row, int64_t k, const int8_t *next, float *out) {
    __m256i sum[8];
    int64_t p = 0;
    UNROLL for (int j = 0; j < 8; j++) sum[j] = _mm256_setzero_si256();
    for (; p + 32 <= k; p += 32) {
        __m256i here = _mm256_loadu_si256((const __m256i *)(q + p)), size = _mm256_abs_epi8(here);
        UNROLL for (int j = 0; j < 8; j++) {
            __m256i w = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)(row[j] + p)), here);
            __m256i pairs = _mm256_maddubs_epi16(size, w); /* at most 2 * 128 * 127: fits */
            sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            if (!(p & 63)) SOON(next + j * k + p);
        }
    }
    for (int j = 0; j < 8; j += 4) {
        __m256i low = _mm256_hadd_epi32(sum[j], sum[j + 1]), high = _mm256_hadd_epi32(sum[j + 2], sum[j + 3]);
        sum[j / 4] = _mm256_hadd_epi32(low, high);
    }
    __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(sum[0], sum[1], 0x20),
                                   _mm256_permute2x128_si256(sum[0], sum[1], 0x31));
    int32_t rest[8] __attribute__((aligned(32))) = {0};
    for (int j = 0; j < 8; j++)
        for (int64_t t = p; t < k; t++) rest[j] += q[t] * row[j][t];
    all = _mm256_add_epi32(all, _mm256_load_si256((const __m256i *)rest));
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(all));
}
#else
#define BYTE_ROWS 4
static inline void byte_sums(const int8_t *q, const int8_t *const *row, int64_t k, const int8_t *next, float *out) {
    for (int j = 0; j < 4; j++) {
        int32_t sum = 0;
        for (int64_t p = 0; p < k; p++) sum += q[p] * row[j][p];
        out[j] = (float)sum;
    }
}
#endif

typedef int32_t alias32 __attribute__((may_alias));

/* x = scale * q but for rounding, q in -127..127 -> scale. */
static float to_bytes(const float *x, int64_t k, int8_t *q) {
    const alias32 *bits = (const alias32 *)x;
    union { int32_t i; float f; } most = {0x0da24260}; /* 1e-30 */
    for (int64_t p = 0; p < k; p++) { /* without their signs numbers are in the order of their bits */
        int32_t size = bits[p] & 0x7fffffff;
        most.i = size > most.i ? size : most.i;
    }
    float inverse = 127.0f / most.f;
    for (int64_t p = 0; p < k; p++) {
        union { float f; int32_t i; } near = {x[p] * inverse + 12582912.0f}; /* 1.5 * 2^23: the integer is below */
        q[p] = (int8_t)near.i;
    }
    return most.f / 127.0f;
}

#define BYTES_AT_ONCE 65536 /* of x, on the stack */

/* `product` for weights of a byte: x is rounded to bytes too, a scale for each row. */
static void byte_product(const float *const *x, float *const *y, const float *weight, int64_t rows, const Matrix *w,
                         int64_t first, int64_t k, int64_t begin, int64_t end, int mode, int64_t next) {
    int64_t most = BYTES_AT_ONCE / k > 0 ? BYTES_AT_ONCE / k : 1, ahead = BYTE_ROWS * (1 + 4096 / (BYTE_ROWS * k));
    if (most > rows) most = rows;
    int8_t q[most * k];
    float own[most], out[BYTE_ROWS];
    const int8_t *data = (const int8_t *)w->data + first * k, *row[BYTE_ROWS];
    const float *scale = w->scale + first;
    for (int64_t i = 0; i < rows; i += most) {
        int64_t many = rows - i < most ? rows - i : most;
        for (int64_t a = 0; a < many; a++) own[a] = to_bytes(x[i + a], k, q + a * k);
        for (int64_t n = begin; n < end; n += BYTE_ROWS) {
            int64_t left = end - n < BYTE_ROWS ? end - n : BYTE_ROWS;
            int64_t later = n + ahead < end ? n + ahead : next >= 0 ? next - first + n + ahead - end : n;
            for (int64_t j = 0; j < BYTE_ROWS; j++) row[j] = data + (n + (j < left ? j : left - 1)) * k;
            for (int64_t a = 0; a < many; a++) {
                byte_sums(q + a * k, row, k, data + later * k, out);
                for (int64_t j = 0; j < left; j++) out[j] *= own[a] * scale[n + j];
                for (int64_t j = 0, r; j < left; j += r) {
                    r = left - j >= 4 ? 4 : 1;
                    put_all(y[i + a] + n + j, out + j, (int)r, w->bias ? w->bias + n + j : NULL, mode,
                            weight ? weight[i + a] : 1);
                }
            }
        }
    }
}

/* y_i[n] (mode) x_i . w_n + bias_n for n in begin..end-1, w_n being row first + n of the matrix. next: row of
 * the matrix that is read afterwards, or -1. */
static void product(const float *const *x, float *const *y, const float *weight, int64_t rows, const Matrix *w,
                    int64_t first, int64_t k, int64_t begin, int64_t end, int mode, int64_t next) {
    if (w->scale) {
        byte_product(x, y, weight, rows, w, first, k, begin, end, mode, next);
        return;
    }
    float out[WIDE_ROWS][4];
    int64_t passes = (rows + WIDE_ROWS - 1) / WIDE_ROWS, ahead = 4 * ((4096 + 4 * k - 1) / (4 * k));
    for (int64_t n = begin; n < end;) {
        int r = end - n >= 4 ? 4 : 1;
        int64_t later = n + ahead < end ? first + n + ahead : next >= 0 ? next + n + ahead - end : first + n;
        const float *row = (const float *)w->data + (first + n) * k, *after = (const float *)w->data + later * k;
        for (int64_t i = 0, pass = 0; pass < passes; pass++) {
            int m = (int)((rows - i + passes - pass - 1) / (passes - pass));
            int fetch = passes == 1 ? 4 : pass < 2 ? 2 : 0; /* the first two passes share the work */
            tiles[m - 1][r == 4](x + i, row, k, after + (pass == 1 ? 2 * k : 0), fetch, out);
            for (int a = 0; a < m; a++, i++)
                put_all(y[i] + n, out[a], r, w->bias ? w->bias + n : NULL, mode, weight ? weight[i] : 1);
        }
        n += r;
    }
}

static void dense(const float *x, int64_t ldx, float *y, int64_t ldy, int64_t rows, const Matrix *w, int64_t k,
                  int64_t begin, int64_t end, int mode) {
    const float *in[MOST_ROWS];
    float *out[MOST_ROWS];
    for (int64_t i = 0; i < rows; i++) in[i] = x + i * ldx, out[i] = y + i * ldy;
    product(in, out, NULL, rows, w, 0, k, begin, end, mode, -1);
}

static void rms(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out) {
    for (int64_t i = 0; i < rows; i++, x += width, out += width) {
        float s = 0;
        for (int64_t d = 0; d < width; d++) s += x[d] * x[d];
        s = 1.0f / sqrtf(s / width + eps);
        for (int64_t d = 0; d < width; d++) out[d] = x[d] * s * weight[d];
    }
}

/* out[c] = silu(bias[c] + sum_j in_j[c] tap[c][j]) */
static void convolve(const float *const *in, const float *restrict tap, const float *bias, int64_t taps,
                     int64_t count, float *restrict out) {
    if (bias) memcpy(out, bias, count * sizeof(float));
    else memset(out, 0, count * sizeof(float));
    if (taps == 4) {
        const float *in0 = in[0], *in1 = in[1], *in2 = in[2], *in3 = in[3];
        for (int64_t c = 0; c < count; c++)
            out[c] += in0[c] * tap[4 * c] + in1[c] * tap[4 * c + 1] + in2[c] * tap[4 * c + 2] + in3[c] * tap[4 * c + 3];
    } else
        for (int64_t j = 0; j < taps; j++)
            for (int64_t c = 0; c < count; c++) out[c] += in[j][c] * tap[c * taps + j];
    for (int64_t c = 0; c < count; c++) out[c] *= sigmoid1(out[c]);
}

/* One (sequence, group): convolution, scan and gated norm of all its tokens. */
static void mamba_group(const Layer *a, const Work *k, int64_t b, int64_t g, float *scratch) {
    int64_t inner = a->heads * a->head_dim, X = inner / a->groups, N = a->columns, before = a->taps - 1;
    int64_t channels = inner + 2 * a->groups * N, W = a->w[0].outs, per = a->heads / a->groups;
    int64_t first[3] = {g * X, inner + g * N, inner + a->groups * N + g * N}, many[3] = {X, N, N};
    float *window = a->window + b * before * channels;
    float *home = a->state + (b * a->groups + g) * N * X, *state = home;
    float *conv = scratch, *decay = conv + X + 2 * N, *u = decay + X, *y = u + X, *log_decay = y + X;
    if (k->waits) {
        state = log_decay + per;
        memcpy(state, home, N * X * sizeof(float));
    }
    memset(log_decay, 0, per * sizeof(float));
    for (int64_t t = 0; t < k->tokens; t++) {
        const float *zx = k->wide + (b * k->tokens + t) * W, *in = zx + inner, *dt = in + channels;
        for (int s = 0, at = 0; s < 3; at += many[s], s++) {
            const float *from[a->taps];
            for (int64_t j = 0; j < a->taps; j++) /* t + j: in window and tokens laid end to end */
                from[j] = (t + j < before ? window + (t + j) * channels : in + (j - before) * W) + first[s];
            convolve(from, a->conv + first[s] * a->taps, a->conv_bias ? a->conv_bias + first[s] : NULL, a->taps, many[s],
                     conv + at);
        }
        const float *B = conv + X, *C = B + N;
        for (int64_t h = 0; h < per; h++) {
            int64_t head = g * per + h;
            float d = dt[head] + a->dt_bias[head];
            d = d > 20.0f ? d : log1pf(exp1(d));
            d = d < a->dt_low ? a->dt_low : d > a->dt_high ? a->dt_high : d;
            float step = d * -expf(a->a_log[head]), e = expf(step);
            log_decay[h] += step;
            for (int64_t p = h * a->head_dim; p < (h + 1) * a->head_dim; p++)
                decay[p] = e, u[p] = conv[p] * d, y[p] = conv[p] * a->skip[head];
            if (k->waits) a->log_decay[(b * k->tokens + t) * a->heads + head] = log_decay[h];
        }
        int64_t n = 0;
        for (; n + 4 <= N; n += 4) {
            float *s = state + n * X, *s1 = s + X, *s2 = s1 + X, *s3 = s2 + X;
            float b0 = B[n], b1 = B[n + 1], b2 = B[n + 2], b3 = B[n + 3];
            float c0 = C[n], c1 = C[n + 1], c2 = C[n + 2], c3 = C[n + 3];
#pragma GCC ivdep
            for (int64_t p = 0; p < X; p++) {
                float e = decay[p], v = u[p];
                float q0 = s[p] * e + b0 * v, q1 = s1[p] * e + b1 * v;
                float q2 = s2[p] * e + b2 * v, q3 = s3[p] * e + b3 * v;
                s[p] = q0, s1[p] = q1, s2[p] = q2, s3[p] = q3;
                y[p] += c0 * q0 + c1 * q1 + c2 * q2 + c3 * q3;
            }
        }
        for (; n < N; n++)
            for (int64_t p = 0; p < X; p++) {
                float q = state[n * X + p] * decay[p] + B[n] * u[p];
                state[n * X + p] = q;
                y[p] += C[n] * q;
            }
        float square = 0, *out = k->narrow + (b * k->tokens + t) * inner + g * X;
        for (int64_t p = 0; p < X; p++) {
            float z = zx[g * X + p];
            y[p] *= z * sigmoid1(z);
            square += y[p] * y[p];
        }
        square = 1.0f / sqrtf(square / X + a->eps);
        for (int64_t p = 0; p < X; p++) out[p] = y[p] * square * a->gate_norm[g * X + p];
        if (k->waits) {
            memcpy(a->u + (b * k->tokens + t) * inner + g * X, u, X * sizeof(float));
            memcpy(a->b + ((b * k->tokens + t) * a->groups + g) * N, B, N * sizeof(float));
        }
    }
    int64_t total = before + k->tokens;
    for (int s = 0; s < 3; s++) {
        if (k->waits) {
            float *full = a->full + b * total * channels;
            for (int64_t t = 0; t < total; t++) {
                const float *in = k->wide + (b * k->tokens + t - before) * W + inner;
                memcpy(full + t * channels + first[s], (t < before ? window + t * channels : in) + first[s],
                       many[s] * sizeof(float));
            }
            continue;
        }
        for (int64_t j = 0; j < before; j++) { /* one token: the window moves on by it */
            const float *in = k->wide + b * W + inner;
            memcpy(window + j * channels + first[s],
                   (j + 1 < before ? window + (j + 1) * channels : in) + first[s], many[s] * sizeof(float));
        }
    }
}

static void mamba(const Layer *a, const Work *k, Team *team, float *normed, float *scratch) {
    int64_t rows = k->batch * k->tokens, inner = a->heads * a->head_dim, W = a->w[0].outs, begin, end;
    rms(k->x, a->norm, a->eps, rows, k->width, normed);
    PHASE(0, team->pieces, {
        share(W, 4, piece, all_, &begin, &end);
        dense(normed, k->width, k->wide, W, rows, a->w + 0, k->width, begin, end, STORE);
    });
    PHASE(1, k->batch * a->groups, { mamba_group(a, k, piece / a->groups, piece % a->groups, scratch); });
    PHASE(2, team->pieces, {
        share(k->width, 4, piece, all_, &begin, &end);
        dense(k->narrow, inner, k->x, k->width, rows, a->w + 1, inner, begin, end, ADD);
    });
}

/* One (sequence, group): new keys and values go to their places, then each token attends to all up to it. */
static void attend(const Layer *a, const Work *k, int64_t b, int64_t g, float *scratch) {
    int64_t P = a->head_dim, per = a->heads / a->groups, queries = a->heads * P, all = a->groups * P;
    int64_t W = queries + 2 * all, seen = k->length[b];
    float *key = a->key + (b * a->groups + g) * a->capacity * P;
    float *value = a->value + (b * a->groups + g) * a->capacity * P;
    for (int64_t t = 0; t < k->tokens; t++) {
        const float *qkv = k->wide + (b * k->tokens + t) * W;
        memcpy(key + (seen + t) * P, qkv + queries + g * P, P * sizeof(float));
        memcpy(value + (seen + t) * P, qkv + queries + all + g * P, P * sizeof(float));
    }
    float scale = 1.0f / sqrtf((float)P);
    Matrix keys = {key, NULL, NULL, a->capacity};
    for (int64_t t = 0; t < k->tokens; t++) {
        int64_t row = b * k->tokens + t, length = seen + t + 1;
        dense(k->wide + row * W + g * per * P, P, scratch, a->capacity, per, &keys, P, 0, length, STORE);
        for (int64_t h = 0; h < per; h++) {
            float *score = scratch + h * a->capacity, most = -INFINITY, total = 0;
            float *out = k->narrow + row * queries + (g * per + h) * P;
            for (int64_t s = 0; s < length; s++) most = score[s] > most ? score[s] : most;
            for (int64_t s = 0; s < length; s++) {
                score[s] = exp1((score[s] - most) * scale);
                total += score[s];
            }
            for (int64_t p = 0; p < P; p++) out[p] = 0;
            for (int64_t s = 0; s < length; s++)
                for (int64_t p = 0; p < P; p++) out[p] += score[s] * value[s * P + p];
            for (int64_t p = 0; p < P; p++) out[p] /= total;
        }
    }
}

static void attention(const Layer *a, const Work *k, Team *team, float *normed, float *scratch) {
    int64_t rows = k->batch * k->tokens, W = a->w[0].outs + a->w[1].outs + a->w[2].outs, begin, end;
    rms(k->x, a->norm, a->eps, rows, k->width, normed);
    PHASE(0, team->pieces, {
        float *to = k->wide;
        for (int m = 0; m < 3; to += a->w[m].outs, m++) {
            share(a->w[m].outs, 4, piece, all_, &begin, &end);
            dense(normed, k->width, to, W, rows, a->w + m, k->width, begin, end, STORE);
        }
    });
    PHASE(1, k->batch * a->groups, { attend(a, k, piece / a->groups, piece % a->groups, scratch); });
    PHASE(2, team->pieces, {
        share(k->width, 4, piece, all_, &begin, &end);
        dense(k->narrow, a->w[0].outs, k->x, k->width, rows, a->w + 3, a->w[0].outs, begin, end, ADD);
    });
}

/* The experts of one token: scores in place of gate, the chosen ones and their weights. */
static void route(const Layer *a, float *gate, int32_t *expert, float *weight) {
    float total = 0;
    for (int64_t e = 0; e < a->experts; e++) gate[e] = sigmoid1(gate[e]);
    for (int64_t c = 0; c < a->chosen; c++) {
        int64_t best = 0;
        int none = 1;
        float most = 0;
        for (int64_t e = 0; e < a->experts; e++) {
            float choice = gate[e] + a->correction[e];
            int taken = 0;
            if (!none && !(choice > most)) continue;
            for (int64_t d = 0; d < c; d++) taken |= expert[d] == e;
            if (!taken) best = e, most = choice, none = 0;
        }
        expert[c] = (int32_t)best;
        weight[c] = gate[best];
        total += weight[c];
    }
    for (int64_t c = 0; c < a->chosen; c++)
        weight[c] = (a->normalise ? weight[c] / (total + 1e-20f) : weight[c]) * a->factor;
}

/* Choices in the order of experts: those of expert e are list[start[e]] .. list[start[e + 1] - 1]. */
static void by_expert(const int32_t *expert, int64_t choices, int64_t experts, int32_t *start, int32_t *list) {
    memset(start, 0, (experts + 2) * sizeof(int32_t));
    for (int64_t i = 0; i < choices; i++) start[expert[i] + 2]++;
    for (int64_t e = 0; e < experts; e++) start[e + 2] += start[e + 1];
    for (int64_t i = 0; i < choices; i++) list[start[expert[i] + 1]++] = (int32_t)i;
}

static void moe(const Layer *a, const Work *k, Team *team, float *normed, float *scratch) {
    int64_t rows = k->batch * k->tokens, E = a->experts, F = a->expert_hidden, L = a->expert_width;
    int64_t S = a->w[3].outs, W = E + a->w[1].outs + S, K = a->chosen, D = k->width, begin, end;
    rms(k->x, a->norm, a->eps, rows, D, normed);
    PHASE(0, team->pieces, {
        float *to = k->wide;
        for (int m = 0; m < 4; m++) { /* router, latent down, shared up */
            if (m == 2 || !a->w[m].data) continue;
            share(a->w[m].outs, 4, piece, all_, &begin, &end);
            dense(normed, D, to, W, rows, a->w + m, D, begin, end, m == 3 ? RELU2 : STORE);
            to += a->w[m].outs;
        }
    });
    /* every thread routes for itself: cheaper than to wait for one that does */
    int32_t *expert = (int32_t *)scratch, *list = expert + rows * K, *start = list + rows * K;
    float *weight = (float *)(start + E + 2), *gate = weight + rows * K;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(gate, k->wide + i * W, E * sizeof(float));
        route(a, gate, expert + i * K, weight + i * K);
    }
    by_expert(expert, rows * K, E, start, list);
    const float *in[MOST_ROWS];
    float *out[MOST_ROWS], each[MOST_ROWS];
    for (int down = 0; down < 2; down++) {
        PHASE(1 + down, team->pieces, {
            share(down ? L : F, 4, piece, all_, &begin, &end);
            for (int64_t i = 0; down && i < rows; i++)
                memset(k->mixed + i * L + begin, 0, (end - begin) * sizeof(float));
            for (int64_t e = 0; e < E; e++) {
                int64_t count = start[e + 1] - start[e];
                for (int64_t n = 0; n < count; n++) {
                    int64_t choice = list[start[e] + n];
                    int64_t row = choice / K;
                    float *h = k->hidden + choice * F;
                    in[n] = down ? h : a->w[1].data ? k->wide + row * W + E : normed + row * D;
                    out[n] = down ? k->mixed + row * L : h;
                    each[n] = weight[choice];
                }
                int64_t later = e + 1;
                while (later < E && start[later + 1] == start[later]) later++;
                int64_t next = later < E ? later * (down ? L : F) + begin : -1;
                if (count && down)
                    product(in, out, each, count, &a->expert_down, e * L, F, begin, end, ADD_WEIGHED, next);
                else if (count)
                    product(in, out, NULL, count, &a->expert_up, e * F, L, begin, end, RELU2, next);
            }
        });
    }
    PHASE(3, team->pieces, {
        share(D, 4, piece, all_, &begin, &end);
        if (a->w[2].data) dense(k->mixed, L, k->x, D, rows, a->w + 2, L, begin, end, ADD);
        for (int64_t i = 0; !a->w[2].data && i < rows; i++)
            for (int64_t d = begin; d < end; d++) k->x[i * D + d] += k->mixed[i * L + d];
        if (a->w[4].data) dense(k->wide + W - S, W, k->x, D, rows, a->w + 4, S, begin, end, ADD);
    });
}

static void mlp(const Layer *a, const Work *k, Team *team, float *normed) {
    int64_t rows = k->batch * k->tokens, S = a->w[0].outs, begin, end;
    rms(k->x, a->norm, a->eps, rows, k->width, normed);
    PHASE(0, team->pieces, {
        share(S, 4, piece, all_, &begin, &end);
        dense(normed, k->width, k->wide, S, rows, a->w + 0, k->width, begin, end, RELU2);
    });
    PHASE(1, team->pieces, {
        share(k->width, 4, piece, all_, &begin, &end);
        dense(k->wide, S, k->x, k->width, rows, a->w + 1, S, begin, end, ADD);
    });
}

static void work(const Layer *layers, int64_t count, const Work *k, Phase *phases, int me, int threads) {
    float *normed = k->normed + me * k->normed_size, *scratch = k->scratch + me * k->scratch_size;
    Team team_ = {threads > 1 ? threads * PIECES : 1, phases}, *team = &team_;
    for (const Layer *a = layers; a < layers + count; a++, team->phase += PHASES) {
        if (a->kind == MAMBA) mamba(a, k, team, normed, scratch);
        else if (a->kind == ATTENTION) attention(a, k, team, normed, scratch);
        else if (a->kind == MOE) moe(a, k, team, normed, scratch);
        else mlp(a, k, team, normed);
    }
}

void nu_run_layers(const Layer *layers, int64_t count, const Work *k, int64_t threads) {
    for (int64_t first = 0, many; first < count; first += many) {
        Phase phases[AT_ONCE * PHASES];
        memset(phases, 0, sizeof phases);
        many = count - first > AT_ONCE ? AT_ONCE : count - first;
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
        work(layers + first, many, k, phases, omp_get_thread_num(), omp_get_num_threads());
#else
        work(layers + first, many, k, phases, 0, 1);
#endif
    }
}

/* The state and window of one (sequence, group) take in the first `keep` pending tokens. */
static void commit_group(const Layer *a, const Work *k, int64_t b, int64_t g, int64_t keep) {
    int64_t inner = a->heads * a->head_dim, X = inner / a->groups, N = a->columns, before = a->taps - 1;
    int64_t channels = inner + 2 * a->groups * N, total = before + k->tokens, per = a->heads / a->groups;
    int64_t first[3] = {g * X, inner + g * N, inner + a->groups * N + g * N}, many[3] = {X, N, N};
    if (!keep) return;
    for (int s = 0; s < 3; s++)
        for (int64_t j = 0; j < before; j++)
            memcpy(a->window + (b * before + j) * channels + first[s],
                   a->full + (b * total + keep + j) * channels + first[s], many[s] * sizeof(float));
    const float *log_decay = a->log_decay + b * k->tokens * a->heads + g * per, *B = a->b + (b * k->tokens * a->groups + g) * N;
    const float *end = log_decay + (keep - 1) * a->heads;
    float *u = a->u + b * k->tokens * inner + g * X, *state = a->state + (b * a->groups + g) * N * X;
    for (int64_t t = 0; t < keep; t++)
        for (int64_t h = 0; h < per; h++) {
            float rest = expf(end[h] - log_decay[t * a->heads + h]);
            for (int64_t p = h * a->head_dim; p < (h + 1) * a->head_dim; p++) u[t * inner + p] *= rest;
        }
    for (int64_t n = 0; n < N; n++, state += X) {
        for (int64_t h = 0; h < per; h++) {
            float decay = expf(end[h]);
            for (int64_t p = h * a->head_dim; p < (h + 1) * a->head_dim; p++) state[p] *= decay;
        }
        for (int64_t t = 0; t < keep; t++) {
            float weight = B[t * a->groups * N + n];
            for (int64_t p = 0; p < X; p++) state[p] += weight * u[t * inner + p];
        }
    }
}

/* For all Mamba layers with pending tokens. */
void nu_commit_layers(const Layer *layers, int64_t count, const Work *k, const int64_t *keep, int64_t threads) {
#ifdef _OPENMP
#pragma omp parallel for collapse(2) num_threads((int)threads) schedule(dynamic)
#endif
    for (int64_t layer = 0; layer < count; layer++)
        for (int64_t b = 0; b < k->batch; b++) {
            const Layer *a = layers + layer;
            for (int64_t g = 0; a->kind == MAMBA && a->full && g < a->groups; g++)
                commit_group(a, k, b, g, keep[b]);
        }
}

/* y [rows, outs] = x [rows, k] w^T, for the head. */
void nu_few_rows(const float *x, float *y, int64_t rows, const float *w, int64_t k, int64_t outs, int64_t threads) {
    Phase phase;
    Matrix matrix = {w, NULL, NULL, outs};
    memset(&phase, 0, sizeof phase);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
#endif
    {
        int64_t begin, end, pieces = threads > 1 ? threads * PIECES : 1;
        Team team_ = {pieces, &phase}, *team = &team_;
        PHASE(0, pieces, {
            share(outs, 4, piece, all_, &begin, &end);
            dense(x, k, y, outs, rows, &matrix, k, begin, end, STORE);
        });
    }
}

/* The first largest number's place; NaN is never it. */
static int64_t largest(const float *x, int64_t count, float *most) {
    enum { BLOCK = 4 * LANES };
    int64_t best = 0, block = 0;
    *most = count ? x[0] : 0;
    if (*most != *most) *most = -INFINITY;
    typedef __typeof__((vec){0} > (vec){0}) mask;
    for (; block + BLOCK <= count; block += BLOCK) {
        vec high = (vec){0} + *most;
        UNROLL for (int i = 0; i < 4; i++) {
            vec other = *(const vecu *)(x + block + i * LANES);
            mask over = other > high;
            high = (vec)((over & (mask)other) | (~over & (mask)high));
        }
        mask above = high > (vec){0} + *most;
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= above[i];
        if (!any) continue;
        for (int64_t i = block; i < block + BLOCK; i++)
            if (x[i] > *most) *most = x[i], best = i;
    }
    for (int64_t i = block; i < count; i++)
        if (x[i] > *most) *most = x[i], best = i;
    return best;
}

/* Twin of `Draft` in ops/decode_kernels.py. A row of `hidden` and of `token` has the pairs that its sequence has
 * not taken in, `counts` of them; out gets `drafts` tokens for each sequence. Strides are from one sequence to the
 * next. */
typedef struct {
    const Layer *layers;
    int64_t count;
    const float *embedding, *embedded_norm, *hidden_norm, *last_norm;
    Matrix join, head;                     /* [D, 2 D]; the ids that may be drafted, [vocabulary, D] */
    float embedded_eps, hidden_eps, last_eps;
    int64_t drafts, hidden_stride, token_stride, out_stride;
    const float *hidden;
    const int64_t *token, *counts;
    int64_t *length, *out;                 /* [batch] tokens seen; [batch, ..] */
    float *joined, *last, *logits;         /* [batch * tokens, 2 D], [batch, D], [batch, vocabulary] */
} Draft;

/* logits of the token after each sequence's last pair; `last` is what the next pair is made of. */
static void apply_module(const Draft *d, const Work *k, int64_t threads) {
    int64_t D = k->width, rows = k->batch * k->tokens;
    Phase phases[(AT_ONCE + 1) * PHASES];
    memset(phases, 0, sizeof phases);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
#endif
    {
        int64_t begin, end, pieces = threads > 1 ? threads * PIECES : 1;
        Team team_ = {pieces, phases}, *team = &team_;
        PHASE(0, pieces, {
            share(D, 4, piece, all_, &begin, &end);
            dense(d->joined, 2 * D, k->x, D, rows, &d->join, 2 * D, begin, end, STORE);
        });
#ifdef _OPENMP
        work(d->layers, d->count, k, phases + PHASES, omp_get_thread_num(), omp_get_num_threads());
#else
        work(d->layers, d->count, k, phases + PHASES, 0, 1);
#endif
        PHASE(1, k->batch, {
            int64_t row = piece * k->tokens + (k->tokens > 1 ? d->counts[piece] - 1 : 0);
            rms(k->x + row * D, d->last_norm, d->last_eps, 1, D, d->last + piece * D);
        });
        PHASE(2, pieces, {
            share(d->head.outs, 4, piece, all_, &begin, &end);
            dense(d->last, D, d->logits, d->head.outs, k->batch, &d->head, D, begin, end, STORE);
        });
    }
}

static void join(const Draft *d, int64_t row, int64_t D, const float *hidden, int64_t token) {
    float *to = d->joined + row * 2 * D;
    rms(d->embedding + token * D, d->embedded_norm, d->embedded_eps, 1, D, to);
    rms(hidden, d->hidden_norm, d->hidden_eps, 1, D, to + D);
}

/* All drafts of all sequences: first the pairs that wait, which are seen then, after them one token after the
 * other. */
void nu_draft(const Draft *d, const Work *first, const Work *later, int64_t threads) {
    int64_t D = first->width, batch = first->batch;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < first->tokens; t++) {
            int64_t at = t < d->counts[b] ? t : d->counts[b] - 1; /* what a shorter row has too many is not kept */
            join(d, b * first->tokens + t, D, d->hidden + b * d->hidden_stride + at * D,
                 d->token[b * d->token_stride + at]);
        }
    for (int64_t number = 0; number < d->drafts; number++) {
        apply_module(d, number ? later : first, threads);
        for (int64_t b = 0; b < batch; b++) {
            float most;
            int64_t token = largest(d->logits + b * d->head.outs, d->head.outs, &most);
            d->out[b * d->out_stride + number] = token;
            d->length[b] += number ? 1 : d->counts[b];
            join(d, b, D, d->last + b * D, token);
        }
    }
    for (int64_t b = 0; b < batch && d->drafts; b++) d->length[b] -= d->drafts - 1;
}

static float log_sum(const float *x, int64_t count, float most) {
    float total = 0;
    for (int64_t n = 0; n < count; n++) total += exp1(x[n] - most);
    return most + logf(total);
}

/* x w^T in `logits`; of each row the place of the largest one among the first `usable`, and its log softmax
 * among those and among all. */
void nu_likeliest(const float *x, float *logits, int64_t rows, const float *w, int64_t k, int64_t outs,
               int64_t usable, int64_t *token, float *logprob, float *model_logprob, int64_t threads) {
    nu_few_rows(x, logits, rows, w, k, outs, threads);
    for (int64_t i = 0; i < rows; i++, logits += outs) {
        float most, all;
        token[i] = largest(logits, usable, &most);
        logprob[i] = model_logprob[i] = most - log_sum(logits, usable, most);
        if (usable == outs) continue;
        largest(logits, outs, &all);
        model_logprob[i] = most - log_sum(logits, outs, all);
    }
}

/* Twin of `Model` in ops/decode_kernels.py: what lies before and behind the layers. */
typedef struct {
    const Layer *layers;
    int64_t count;
    const float *embedding, *norm, *head;  /* [.., D], [D], [vocabulary, D] */
    float eps;
    int64_t vocabulary;
} Model;

/* The place of the first id that is none of the model's, or -1. */
int64_t nu_first_unknown(const Model *m, const int64_t *token, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (token[i] < 0 || token[i] >= m->vocabulary) return i;
    return -1;
}

/* Tokens [batch, tokens] through all layers; hidden [batch * tokens, D] after the last norm. */
void nu_advance(const Model *m, const Work *k, const int64_t *token, float *hidden, int64_t threads) {
    int64_t rows = k->batch * k->tokens;
    for (int64_t i = 0; i < rows; i++)
        memcpy(k->x + i * k->width, m->embedding + token[i] * k->width, k->width * sizeof(float));
    nu_run_layers(m->layers, m->count, k, threads);
    rms(k->x, m->norm, m->eps, rows, k->width, hidden);
}

/* `advance`, what is likeliest after each place (`likeliest`), and a commit of the tokens that stay: keep[b] is 1
 * and the drafts, tokens 1 and later, up to the first that is not the likeliest after the token before it. */
void nu_verify(const Model *m, const Work *k, const int64_t *token, float *hidden, float *logits, int64_t usable,
            int64_t *found, float *logprob, float *model_logprob, int64_t *keep, int64_t threads) {
    int64_t K = k->tokens;
    nu_advance(m, k, token, hidden, threads);
    nu_likeliest(hidden, logits, k->batch * K, m->head, k->width, m->vocabulary, usable, found, logprob, model_logprob,
              threads);
    for (int64_t b = 0; b < k->batch; b++)
        for (keep[b] = 1; keep[b] < K && token[b * K + keep[b]] == found[b * K + keep[b] - 1];) keep[b]++;
    if (k->waits) nu_commit_layers(m->layers, m->count, k, keep, threads);
}

/* Drafts after what each sequence has seen and its pending token, and `verify` of them all: tokens [batch, K] gets
 * both, K - 1 being drafts. Then sequences have seen the tokens that stay: last [batch, D] is hidden after those,
 * next [batch] the token that is pending. */
void nu_round(Draft *d, const Work *first, const Work *later, const Model *m, const Work *k, const int64_t *pending,
              int64_t *tokens, float *hidden, float *logits, int64_t usable, int64_t *found, float *logprob,
              float *model_logprob, int64_t *keep, float *last, int64_t *next, int64_t threads) {
    int64_t K = k->tokens, D = k->width;
    d->out = tokens + 1, d->out_stride = K, d->drafts = K - 1;
    nu_draft(d, first, later, threads);
    for (int64_t b = 0; b < k->batch; b++) tokens[b * K] = pending[b];
    nu_verify(m, k, tokens, hidden, logits, usable, found, logprob, model_logprob, keep, threads);
    for (int64_t b = 0; b < k->batch; b++) {
        int64_t at = b * K + keep[b] - 1;
        k->length[b] += keep[b];
        next[b] = found[at];
        memcpy(last + b * D, hidden + at * D, D * sizeof(float));
    }
}
