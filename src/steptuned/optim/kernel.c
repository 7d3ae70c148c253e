/* The arithmetic of flat.py on the CPU, in one pass over memory. kernel.py compiles and calls it.

   All tensors of a call form one vector, which is divided into units of UNIT elements; kernel.py
   defines UNIT. Threads take units one by one and write each unit's sums into its own slot;
   kernel.py adds the slots in order. Within a unit, sums use a fixed number of lanes, so results
   depend neither on the number of threads nor on the width of the processor's vectors. REAL is
   float or double. */

#include <stdint.h>
#include <string.h>

#define BLOCK 1024 /* elements of one tensor that are checked and summed together */
#define LANES ((int64_t)(32 / sizeof(REAL)))
#define INLINE static inline __attribute__((always_inline))

typedef REAL lanes __attribute__((vector_size(32)));

struct call {
    int64_t tensors;
    const int64_t *starts; /* where in the vector each tensor begins, and where the last one ends */
    REAL *const *p;        /* theta */
    const REAL *const *g;  /* the gradients of this pass */
    REAL *const *g0;       /* first pass: where to keep sign g + decay theta, NULL for nowhere */
    REAL *const *G;
    double sign, decay;               /* the gradient of J is sign g + decay theta */
    double sign0, decay0, ratio0;     /* g0 is ratio0 (sign0 g0 + decay0 theta) */
    double step;                      /* theta -= step (gradient of J) */
    double beta, share, scale;        /* G = beta G + share (g1 - g0), share = (1 - beta) scale */
    double *along, *square;           /* per unit: <G, g0>, and |g0|^2 or |gradient of J|^2 */
    int64_t next;                     /* the first unit that no thread has taken */
};

/* The scalars of a call in its precision. A copy, which stores to tensors cannot alias. */
struct numbers {
    REAL sign, decay, sign0, decay0, ratio0, step, beta, share, scale;
};

INLINE struct numbers numbers(const struct call *c) {
    return (struct numbers){c->sign, c->decay, c->sign0, c->decay0, c->ratio0,
                            c->step, c->beta,  c->share, c->scale};
}

/* Where a unit begins; it ends UNIT elements later, in the same tensor or another. */
struct cursor {
    int64_t tensor, at, left;
};

INLINE int take(struct call *c, struct cursor *it, int64_t *unit) {
    *unit = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
    int64_t start = *unit * UNIT, low = 0, high = c->tensors;
    if (start >= c->starts[c->tensors])
        return 0;
    while (high - low > 1) { /* the last tensor that begins at or before the unit */
        int64_t middle = (low + high) / 2;
        if (c->starts[middle] <= start)
            low = middle;
        else
            high = middle;
    }
    *it = (struct cursor){low, start - c->starts[low], UNIT};
    return 1;
}

/* How many of the next elements lie in one tensor, at most `most`; 0 at the end of the unit. */
INLINE int64_t stretch(const struct call *c, struct cursor *it, int64_t most) {
    while (it->tensor < c->tensors && it->at == c->starts[it->tensor + 1] - c->starts[it->tensor])
        it->tensor++, it->at = 0;
    if (it->tensor == c->tensors || it->left == 0)
        return 0;
    int64_t n = c->starts[it->tensor + 1] - c->starts[it->tensor] - it->at;
    n = n < it->left ? n : it->left;
    return n < most ? n : most;
}

INLINE void advance(struct cursor *it, int64_t n) {
    it->at += n, it->left -= n;
}

INLINE lanes load(const REAL *from, int64_t n) {
    lanes x = {0};
    memcpy(&x, from, n * sizeof(REAL));
    return x;
}

INLINE void store(REAL *to, lanes x, int64_t n) {
    memcpy(to, &x, n * sizeof(REAL));
}

INLINE double sum(lanes x) {
    double total = 0;
    for (int64_t l = 0; l < LANES; l++)
        total += (double)x[l];
    return total;
}

/* ------------------------------------------------------------------------------ first pass */

INLINE void move(struct numbers k, REAL *p, const REAL *g, REAL *g0, int64_t n, int decayed) {
    lanes theta = load(p, n), gradient = k.sign * load(g, n);
    if (decayed)
        gradient += k.decay * theta;
    store(p, theta - k.step * gradient, n);
    if (g0)
        store(g0, gradient, n);
}

INLINE void first(struct call *c, int decayed) {
    const struct numbers k = numbers(c);
    struct cursor it;
    for (int64_t unit, n, i; take(c, &it, &unit);)
        for (; (n = stretch(c, &it, BLOCK)); advance(&it, n)) {
            REAL *p = c->p[it.tensor] + it.at, *g0 = c->g0[it.tensor];
            const REAL *g = c->g[it.tensor] + it.at;
            g0 = g0 ? g0 + it.at : 0;
            for (i = 0; i + LANES <= n; i += LANES)
                move(k, p + i, g + i, g0 ? g0 + i : 0, LANES, decayed);
            if (i < n)
                move(k, p + i, g + i, g0 ? g0 + i : 0, n - i, decayed);
        }
}

/* ----------------------------------------------------------------------------- second pass */

struct sums {
    lanes dg, along, square;
};

INLINE void measure(struct numbers k, REAL *p, const REAL *g, const REAL *held, REAL *G,
                    REAL *old, struct sums *s, int64_t n, int decayed) {
    lanes theta = load(p, n), before = load(G, n);
    lanes g1 = k.sign * load(g, n), g0 = k.sign0 * load(held, n);
    if (decayed) {
        g1 += k.decay * theta;
        g0 = (g0 + k.decay0 * theta) * k.ratio0;
    }
    lanes dg = g1 - g0, after = k.beta * before + k.share * dg, scaled = k.scale * dg;
    store(p, theta - k.step * g1, n);
    store(old, before, n);
    store(G, after, n);
    s->dg += scaled * scaled;
    s->along += after * g0;
    s->square += g0 * g0;
}

INLINE void second(struct call *c, int decayed) {
    const struct numbers k = numbers(c);
    REAL old[BLOCK]; /* the block's G before this pass, which stays in the fastest cache */
    struct cursor it;
    for (int64_t unit, n, i; take(c, &it, &unit);) {
        double along = 0, square = 0;
        for (; (n = stretch(c, &it, BLOCK)); advance(&it, n)) {
            REAL *p = c->p[it.tensor] + it.at, *G = c->G[it.tensor] + it.at;
            const REAL *g = c->g[it.tensor] + it.at, *g0 = c->g0[it.tensor] + it.at;
            struct sums s = {{0}, {0}, {0}};
            for (i = 0; i + LANES <= n; i += LANES)
                measure(k, p + i, g + i, g0 + i, G + i, old + i, &s, LANES, decayed);
            if (i < n)
                measure(k, p + i, g + i, g0 + i, G + i, old + i, &s, n - i, decayed);
            REAL dg = sum(s.dg);
            if (dg - dg == 0) {
                along += sum(s.along);
            } else { /* not finite: G fades, as if g1 - g0 were zero */
                for (i = 0; i < n; i++)
                    G[i] = k.beta * old[i];
                along = __builtin_nan("");
            }
            square += sum(s.square);
        }
        c->along[unit] = along, c->square[unit] = square;
    }
}

/* ------------------------------------------------------------------ norm of the gradient of J */

INLINE lanes squared(struct numbers k, const REAL *p, const REAL *g, int64_t n, int decayed) {
    lanes gradient = k.sign * load(g, n);
    if (decayed)
        gradient += k.decay * load(p, n);
    return gradient * gradient;
}

INLINE void norm(struct call *c, int decayed) {
    const struct numbers k = numbers(c);
    struct cursor it;
    for (int64_t unit, n, i; take(c, &it, &unit);) {
        double square = 0;
        for (; (n = stretch(c, &it, BLOCK)); advance(&it, n)) {
            const REAL *p = c->p[it.tensor] + it.at, *g = c->g[it.tensor] + it.at;
            lanes s = {0};
            for (i = 0; i + LANES <= n; i += LANES)
                s += squared(k, p + i, g + i, LANES, decayed);
            if (i < n)
                s += squared(k, p + i, g + i, n - i, decayed);
            square += sum(s);
        }
        c->square[unit] = square;
    }
}

/* ----------------------------------------------- wider vectors where the processor has them */

#define BOTH(inner) (c->decay == 0 && c->decay0 == 0 ? inner(c, 0) : inner(c, 1))

#ifdef __x86_64__
#define ENTRY(name, inner)                                                                         \
    __attribute__((target("avx2"))) static void name##_avx2(struct call *c) { BOTH(inner); }       \
    static void name##_any(struct call *c) { BOTH(inner); }                                        \
    void name(struct call *c) {                                                                    \
        __builtin_cpu_supports("avx2") ? name##_avx2(c) : name##_any(c);                           \
    }
#else
#define ENTRY(name, inner)                                                                         \
    void name(struct call *c) { BOTH(inner); }
#endif

ENTRY(first_pass, first)
ENTRY(second_pass, second)
ENTRY(square, norm)
