/* Fused elementwise kernels of the decoder for float32 on CPUs: one pass over memory where plain tensor operations
 * take five to ten. Compiled at first use by native.py. Rows are shared out over `threads` in fixed pieces, so a
 * result depends on the number of threads only where sums cross rows (the gradient of the norm's weight).
 *
 * No -ffast-math: NaN and infinity must come through. `omp simd reduction` alone allows sums to be reordered.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* exp for |x| within float range, relative error below 2e-7; NaN stays NaN. Without calls or branches, so that it
 * vectorises: 2^n by its exponent bits, the rest by a polynomial on [-ln2/2, ln2/2] (coefficients of Cephes expf). */
static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline float sigmoid_fast(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

/* y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps). x, y [n, d]; rstd [n] */
void rms_norm_forward(const float *x, const float *w, float *y, float *rstd, i64 n, i64 d, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < n; i++) {
        const float *xi = x + i * d;
        float *yi = y + i * d;
        float s = 0;
#pragma omp simd reduction(+ : s)
        for (i64 j = 0; j < d; j++) s += xi[j] * xi[j];
        float r = 1.0f / sqrtf(s / (float)d + eps);
        rstd[i] = r;
#pragma omp simd
        for (i64 j = 0; j < d; j++) yi[j] = xi[j] * r * w[j];
    }
}

/* dx = rstd (dy w - xhat mean(dy w xhat)), xhat = x rstd; partial [threads, d] sums dy xhat over each thread's rows */
void rms_norm_backward(const float *dy, const float *x, const float *w, const float *rstd, float *dx, float *partial,
                       i64 n, i64 d, int threads) {
    memset(partial, 0, sizeof(float) * (size_t)(threads * d));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *dw = partial + t * d;
        for (i64 i = n * t / threads; i < n * (t + 1) / threads; i++) {
            const float *xi = x + i * d, *gi = dy + i * d;
            float *oi = dx + i * d;
            float r = rstd[i], s = 0;
#pragma omp simd reduction(+ : s)
            for (i64 j = 0; j < d; j++) s += gi[j] * w[j] * xi[j];
            float c = s * r * r / (float)d;
#pragma omp simd
            for (i64 j = 0; j < d; j++) {
                dw[j] += gi[j] * xi[j] * r;
                oi[j] = r * (gi[j] * w[j] - c * xi[j]);
            }
        }
    }
}

/* y = gate sigmoid(gate) up. gate, up [n, f] with row strides; y [n, f] */
void swiglu_forward(const float *gate, const float *up, float *y, i64 n, i64 f, i64 gate_stride, i64 up_stride,
                    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < n; i++) {
        const float *g = gate + i * gate_stride, *u = up + i * up_stride;
        float *o = y + i * f;
#pragma omp simd
        for (i64 j = 0; j < f; j++) o[j] = g[j] * sigmoid_fast(g[j]) * u[j];
    }
}

void swiglu_backward(const float *dy, const float *gate, const float *up, float *dgate, float *dup, i64 n, i64 f,
                     i64 gate_stride, i64 up_stride, i64 grad_stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < n; i++) {
        const float *g = gate + i * gate_stride, *u = up + i * up_stride, *d = dy + i * f;
        float *dg = dgate + i * grad_stride, *du = dup + i * grad_stride;
#pragma omp simd
        for (i64 j = 0; j < f; j++) {
            float s = sigmoid_fast(g[j]), a = g[j] * s;
            du[j] = d[j] * a;
            dg[j] = d[j] * u[j] * (s + a * (1.0f - s));
        }
    }
}

/* y = x cos + rotate_half(x) sin over the last dimension, or its transpose (for the backward pass).
 * x, y [b, t, h, hd] with strides (last contiguous); cos, sin [b or 1, t, hd] contiguous */
void rope(const float *x, const float *cos, const float *sin, float *y, i64 b, i64 t, i64 h, i64 hd, const i64 *xs,
          const i64 *ys, i64 table_batch_stride, int transpose, int threads) {
    i64 half = hd / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 bt = 0; bt < b * t; bt++) {
        i64 ib = bt / t, it = bt % t;
        const float *c = cos + ib * table_batch_stride + it * hd, *s = sin + ib * table_batch_stride + it * hd;
        for (i64 ih = 0; ih < h; ih++) {
            const float *xi = x + ib * xs[0] + it * xs[1] + ih * xs[2];
            float *yi = y + ib * ys[0] + it * ys[1] + ih * ys[2];
            if (transpose) {
#pragma omp simd
                for (i64 j = 0; j < half; j++) {
                    float p = xi[j], q = xi[j + half];
                    yi[j] = p * c[j] + q * s[j + half];
                    yi[j + half] = q * c[j + half] - p * s[j];
                }
            } else {
#pragma omp simd
                for (i64 j = 0; j < half; j++) {
                    float p = xi[j], q = xi[j + half];
                    yi[j] = p * c[j] - q * s[j];
                    yi[j + half] = q * c[j + half] + p * s[j + half];
                }
            }
        }
    }
}

/* The visible part [begin, end) of a row of c scores, and [from, to) around it in whole vectors, so that no loop ends
 * in scalar steps. What lies between is in nobody's sight: it is filled before the loops and cleared after them. */
typedef struct {
    i64 begin, end, from, to;
} span;

static inline span visible(const int32_t *first, i64 row, i64 slot, i64 t, i64 lo, i64 c) {
    span s = {(first ? first[row * t + slot] : 0) - lo, slot + 1 - lo, 0, 0};
    s.begin = s.begin < 0 ? 0 : s.begin;
    s.from = s.begin & ~(i64)15;
    s.to = (s.end + 15) & ~(i64)15;
    s.to = s.to > c ? c : s.to;
    return s;
}

static inline void fill_around(float *x, span s, float value) {
    for (i64 j = s.from; j < s.begin; j++) x[j] = value;
    for (i64 j = s.end; j < s.to; j++) x[j] = value;
}

static inline void clear_around(float *x, span s, i64 c) {
    memset(x, 0, sizeof(float) * (size_t)s.begin);
    memset(x + s.end, 0, sizeof(float) * (size_t)(c - s.end));
}

/* Attention weights of a block of queries, in place. scores [b, h, r, c]: queries at slots i.., keys at slots lo..; a
 * query at slot s sees the keys first[row, s] .. s (first NULL: from slot 0). Entries out of sight become 0.
 * lse [b, h, t] takes the log-sum-exp of the scaled scores. */
void attention_weights(float *scores, float *lse, const int32_t *first, i64 b, i64 h, i64 r, i64 c, i64 i, i64 lo, i64 t,
                       float scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 row = 0; row < b * h * r; row++) {
        i64 bh = row / r, slot = i + row % r;
        span v = visible(first, bh / h, slot, t, lo, c);
        float *s = scores + row * c, top = s[v.begin], sum = 0;
        fill_around(s, v, -INFINITY);
#pragma omp simd reduction(max : top)
        for (i64 j = v.from; j < v.to; j++) top = s[j] > top ? s[j] : top;
#pragma omp simd reduction(+ : sum)
        for (i64 j = v.from; j < v.to; j++) {
            float e = exp_fast((s[j] - top) * scale);
            s[j] = e;
            sum += e;
        }
        float inverse = 1.0f / sum;
#pragma omp simd
        for (i64 j = v.from; j < v.to; j++) s[j] *= inverse;
        clear_around(s, v, c);
        lse[bh * t + slot] = top * scale + logf(sum);
    }
}

/* scores become the weights p = exp(scale s - lse), grad (of the weights) becomes that of the unscaled scores:
 * scale p (grad - sum_j p_j grad_j). Same layout as above. */
void attention_weights_backward(float *scores, float *grad, const float *lse, const int32_t *first, i64 b, i64 h, i64 r,
                                i64 c, i64 i, i64 lo, i64 t, float scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 row = 0; row < b * h * r; row++) {
        i64 bh = row / r, slot = i + row % r;
        span v = visible(first, bh / h, slot, t, lo, c);
        float *p = scores + row * c, *g = grad + row * c, l = lse[bh * t + slot], sum = 0;
        fill_around(p, v, -INFINITY);
        fill_around(g, v, 0);
#pragma omp simd reduction(+ : sum)
        for (i64 j = v.from; j < v.to; j++) {
            float e = exp_fast(p[j] * scale - l);
            p[j] = e;
            sum += e * g[j];
        }
#pragma omp simd
        for (i64 j = v.from; j < v.to; j++) g[j] = scale * p[j] * (g[j] - sum);
        clear_around(p, v, c);
        clear_around(g, v, c);
    }
}
