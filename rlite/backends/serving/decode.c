/* All of a decode step but its matrix products, on CPU in float32; `native.py` compiles and calls them.

   decode_attention: attention of one new token per sequence over the paged cache. A page has BLOCK positions: keys are
   [width][BLOCK] and values [BLOCK][width] per head. A table names the pages of each sequence. The query
   heads that share a key head are computed together, so that each block is read from memory once. The softmax is
   computed block by block. The order of all sums depends on the sequence alone, not on the batch or the threads. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* the floats of a register: the compiler keeps wider vectors in memory */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

struct shape {
    int64_t num_rows, num_heads, num_kv_heads, key_width, value_width, table_width, window, num_threads;
    float scale, softcap;
};

/* e^x for x <= 0, with a relative error below 2e-7. NaN stays NaN. */
static inline lanes exponential(lanes x) {
    lanes low = (lanes){} - 87.0f;
    bits is_below = (bits)(x < low);
    x = (lanes)(((bits)low & is_below) | ((bits)x & ~is_below));
    lanes shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693145752f - n * 1.42860677e-6f; /* log 2 in two parts */
    lanes p = 1.98756915e-4f * r + 1.39819995e-3f;
    p = p * r + 8.33345190e-3f;
    p = p * r + 4.16657959e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * r * r + r + 1.0f;
    return p * (lanes)(((bits)shifted + 127) << 23);
}

static inline lanes load(const float *from) { return *(const lanes *)from; }

/* Scores of one block, and their maximum. Positions outside [begin, end) are hidden. A cap of 0 is none. */
static float scores_of(const float *query, const float *keys, int64_t dim, int64_t begin, int64_t end, float cap,
                       float *scores) {
    lanes sums[BLOCK / LANES] = {};
    for (int64_t d = 0; d < dim; d++)
        for (int i = 0; i < BLOCK / LANES; i++)
            sums[i] += query[d] * load(keys + d * BLOCK + i * LANES);
    memcpy(scores, sums, sizeof sums);
    if (cap > 0)
        for (int64_t j = begin; j < end; j++)
            scores[j] = cap * __builtin_tanhf(scores[j] / cap);
    float most = -__builtin_inff();
    for (int64_t j = 0; j < BLOCK; j++) {
        if (j < begin || j >= end)
            scores[j] = -__builtin_inff();
        most = scores[j] > most ? scores[j] : most;
    }
    return most;
}

/* sums += weights @ values, for `num` positions. */
static void add_values(const float *weights, const float *values, int64_t num, int64_t dim, float *sums) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        lanes part[64 / LANES];
        for (int i = 0; i < 64 / LANES; i++)
            part[i] = load(sums + d + i * LANES);
        for (int64_t j = 0; j < num; j++)
            for (int i = 0; i < 64 / LANES; i++)
                part[i] += weights[j] * load(values + j * dim + d + i * LANES);
        memcpy(sums + d, part, sizeof part);
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < num; j++)
            sums[d] += weights[j] * values[j * dim + d];
}

/* One sequence and one key head: all query heads that share it. `keys` and `values` are those of the head in page 0;
   `output` begins as zeros; `sinks` may be null. */
static void attend(const struct shape *s, const float *query, const float *keys, const float *values,
                   const int64_t *table, int64_t length, const float *sinks, float *output) {
    int64_t dim = s->key_width, width = s->value_width, num = s->num_heads / s->num_kv_heads;
    int64_t first = s->window > 0 && length > s->window ? length - s->window : 0;
    float most[num], total[num], scaled[num * dim], weights[BLOCK];
    for (int64_t d = 0; d < num * dim; d++)
        scaled[d] = query[d] * s->scale;
    for (int64_t h = 0; h < num; h++)
        most[h] = sinks ? sinks[h] : -__builtin_inff(), total[h] = sinks ? 1 : 0;
    for (int64_t start = first / BLOCK * BLOCK; start < length; start += BLOCK) {
        int64_t page = table[start / BLOCK] * s->num_kv_heads * BLOCK;
        int64_t begin = first > start ? first - start : 0, end = length - start < BLOCK ? length - start : BLOCK;
        for (int64_t h = 0; h < num; h++) {
            float found = scores_of(scaled + h * dim, keys + page * dim, dim, begin, end, s->softcap, weights);
            float *sums = output + h * width;
            if (found > most[h]) {
                lanes change = exponential((lanes){} + (most[h] - found));
                float factor = total[h] > 0 ? change[0] : 0;
                total[h] *= factor;
                for (int64_t d = 0; d < width; d++)
                    sums[d] *= factor;
                most[h] = found;
            }
            lanes sum = {};
            for (int64_t j = 0; j < BLOCK; j += LANES) {
                lanes p = exponential(load(weights + j) - most[h]);
                for (int i = 0; i < LANES; i++)
                    if (j + i < begin || j + i >= end)
                        p[i] = 0;
                sum += p;
                memcpy(weights + j, &p, sizeof p);
            }
            for (int i = 0; i < LANES; i++)
                total[h] += sum[i];
            add_values(weights + begin, values + (page + begin) * width, end - begin, width, sums);
        }
    }
    for (int64_t h = 0; h < num; h++)
        for (int64_t d = 0; d < width; d++)
            output[h * width + d] /= total[h];
}

/* query [rows, heads, key width]; key, value [rows, kv_heads, width] of the new tokens, which are all written to the
   cache at `positions` [rows] before any is read; table [rows, table width]; keys and values are one layer of the cache;
   sinks [heads] or null; output [rows, heads, value width]. */
void decode_attention(const struct shape *s, const float *query, const float *key, const float *value,
                      const int64_t *positions, const int64_t *table, float *keys, float *values, const float *sinks,
                      float *output) {
    int64_t dim = s->key_width, width = s->value_width, num = s->num_heads / s->num_kv_heads;
    memset(output, 0, sizeof(float) * s->num_rows * s->num_heads * width);
    for (int64_t i = 0; i < s->num_rows * s->num_kv_heads; i++) {
        int64_t row = i / s->num_kv_heads, position = positions[row], offset = position % BLOCK;
        int64_t page = table[row * s->table_width + position / BLOCK];
        int64_t at = (page * s->num_kv_heads + i % s->num_kv_heads) * BLOCK;
        for (int64_t d = 0; d < dim; d++)
            keys[at * dim + d * BLOCK + offset] = key[i * dim + d];
        memcpy(values + (at + offset) * width, value + i * width, sizeof(float) * width);
    }
#pragma omp parallel for num_threads(s->num_threads) schedule(dynamic, 4) if (s->num_threads > 1)
    for (int64_t i = 0; i < s->num_rows * s->num_kv_heads; i++) {
        int64_t row = i / s->num_kv_heads, head = i % s->num_kv_heads, at = row * s->num_heads + head * num;
        attend(s, query + at * dim, keys + head * BLOCK * dim, values + head * BLOCK * width,
               table + row * s->table_width, positions[row] + 1, sinks ? sinks + head * num : 0, output + at * width);
    }
}

static float inverse_rms(const float *x, int64_t width, float eps) {
    lanes part = {};
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES)
        part += load(x + j) * load(x + j);
    float sum = 0;
    for (; j < width; j++)
        sum += x[j] * x[j];
    for (int i = 0; i < LANES; i++)
        sum += part[i];
    return 1 / __builtin_sqrtf(sum / width + eps);
}

/* x += added, then output = x / rms(x) * weight, for x, added, output [rows, width]; `added` may be null. */
void add_rms_norm(int64_t rows, int64_t width, float eps, int64_t threads, float *x, const float *added,
                  const float *weight, float *output) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        float *row = x + i * width;
        for (int64_t j = 0; added && j < width; j++)
            row[j] += added[i * width + j];
        float scale = inverse_rms(row, width, eps);
        for (int64_t j = 0; j < width; j++)
            output[i * width + j] = row[j] * scale * weight[j];
    }
}

/* One head: divided by its rms and multiplied by `weight` [dim], unless that is null, and rotated. `output` may be x. */
static inline void rotate(const float *x, int64_t dim, float eps, const float *weight, const float *angles,
                          float *output) {
    const float *cos = angles, *sin = angles + dim;
    float scale = weight ? inverse_rms(x, dim, eps) : 1;
    for (int64_t d = 0; d < dim / 2; d++) {
        float a = x[d], b = x[d + dim / 2];
        if (weight)
            a *= scale * weight[d], b *= scale * weight[d + dim / 2];
        output[d] = a * cos[d] + b * sin[d];
        output[d + dim / 2] = b * cos[d + dim / 2] + a * sin[d + dim / 2];
    }
}

/* x [rows, heads, dim] in place: each head is normalised and rotated by the angles of its row's position: angles
   [positions][2][dim], cosines and sines, of which those of the first half are negated. */
void rms_norm_rotate(int64_t rows, int64_t heads, int64_t dim, float eps, int64_t threads, float *x,
                     const float *weight, const int64_t *positions, const float *angles) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows * heads; i++) {
        const float *own = angles + positions[i / heads] * 2 * dim;
        rotate(x + i * dim, dim, eps, weight, own, x + i * dim);
    }
}

/* x [rows, heads + 2 kv_heads, dim]: queries, keys and values of a merged product. Queries and keys are normalised and
   rotated; query [rows, heads, dim], key and value [rows, kv_heads, dim]. */
void split_rotate(int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, float eps, int64_t threads,
                  const float *x, const float *query_weight, const float *key_weight, const int64_t *positions,
                  const float *angles, float *query, float *key, float *value) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        const float *own = angles + positions[i] * 2 * dim, *from = x + i * (heads + 2 * kv_heads) * dim;
        for (int64_t h = 0; h < heads; h++, from += dim)
            rotate(from, dim, eps, query_weight, own, query + (i * heads + h) * dim);
        for (int64_t h = 0; h < kv_heads; h++, from += dim)
            rotate(from, dim, eps, key_weight, own, key + (i * kv_heads + h) * dim);
        memcpy(value + i * kv_heads * dim, from, sizeof(float) * kv_heads * dim);
    }
}

static inline lanes silu(lanes x) {
    lanes low;
    bits is_negative = (bits)(x < (lanes){});
    low = (lanes)(((bits)x & is_negative) | ((bits)(-x) & ~is_negative)); /* -|x|, or NaN */
    lanes e = exponential(low);
    lanes numerator = (lanes)(((bits)e & is_negative) | ((bits)((lanes){} + 1.0f) & ~is_negative));
    return x * numerator / (1.0f + e);
}

/* output = silu(gate) * up, for `num` values each. `output` may be gate. */
static void multiply_gate(int64_t num, const float *gate, const float *up, float *output) {
    int64_t j = 0;
    for (; j + LANES <= num; j += LANES) {
        lanes x = silu(load(gate + j)) * load(up + j);
        memcpy(output + j, &x, sizeof x);
    }
    for (; j < num; j++)
        output[j] = gate[j] / (1 + __builtin_expf(-gate[j])) * up[j];
}

#define RUN (64 * LANES)

/* gate = silu(gate) * up, for `num` values each. */
void silu_multiply(int64_t num, int64_t threads, float *gate, const float *up) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < num; i += RUN)
        multiply_gate(num - i < RUN ? num - i : RUN, gate + i, up + i, gate + i);
}

/* output [rows, width] = silu(gate) * up, for x [rows, 2 width], the gate and up of a merged product. */
void split_silu_multiply(int64_t rows, int64_t width, int64_t threads, const float *x, float *output) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++)
        multiply_gate(width, x + 2 * i * width, x + (2 * i + 1) * width, output + i * width);
}

#define SEGMENT (8 * LANES)

/* Weights e^(x - most) of one segment, 0 beyond `num` and for x below the range of e^x. Return their sum. */
static double weights_of(const float *x, int64_t num, float most, float *weights) {
    lanes sum = {};
    for (int64_t j = 0; j < SEGMENT; j += LANES) {
        lanes value = (lanes){} - __builtin_inff();
        if (j + LANES <= num)
            value = load(x + j);
        else
            for (int i = 0; j + i < num; i++)
                value[i] = x[j + i];
        value -= most;
        bits is_kept = ~(bits)(value < (lanes){} - 87.0f); /* NaN is kept */
        lanes weight = (lanes)((bits)exponential(value) & is_kept);
        sum += weight;
        memcpy(weights + j, &weight, sizeof weight);
    }
    double total = 0;
    for (int i = 0; i < LANES; i++)
        total += sum[i];
    return total;
}

/* The first index at which the cumulative sum of a row's weights is above u * total. Its weight is not 0. */
static int64_t drawn(const float *x, int64_t num, float most, double total, const double *sums, float u) {
    int64_t segment = 0, found = 0;
    double target = u * total, before = 0;
    float weights[SEGMENT];
    for (int64_t k = 0; k < (num + SEGMENT - 1) / SEGMENT && before <= target; k++)
        if (sums[k] > 0) {
            segment = k;
            before += sums[k];
        }
    before -= sums[segment];
    int64_t left = num - segment * SEGMENT;
    weights_of(x + segment * SEGMENT, left, most, weights);
    for (int64_t j = 0; j < SEGMENT && before <= target; j++)
        if (weights[j] > 0) {
            found = j;
            before += weights[j];
        }
    return segment * SEGMENT + found;
}

/* tokens [rows] by the inverse of each row's cumulative distribution at `uniform` [rows], or the most likely ones where
   `is_greedy` [rows]; logprobs [rows] of these tokens, NaN for a row with NaN or infinity; logits [rows, vocabulary]. */
void draw(int64_t rows, int64_t vocabulary, int64_t threads, const float *logits, const float *uniform,
          const uint8_t *is_greedy, int64_t *tokens, float *logprobs) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        const float *x = logits + i * vocabulary;
        int64_t best = 0, num = (vocabulary + SEGMENT - 1) / SEGMENT;
        float weights[SEGMENT];
        double sums[num], total = 0;
        for (int64_t j = 1; j < vocabulary; j++)
            best = x[j] > x[best] ? j : best;
        for (int64_t k = 0; k < num; k++)
            total += sums[k] = weights_of(x + k * SEGMENT, vocabulary - k * SEGMENT, x[best], weights);
        tokens[i] = is_greedy[i] || total != total ? best : drawn(x, vocabulary, x[best], total, sums, uniform[i]);
        logprobs[i] = x[tokens[i]] - x[best] - (float)__builtin_log(total);
    }
}
