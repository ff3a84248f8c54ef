// Merge of attentions over parts of the keys.

#include <cmath>
#include <vector>

#include "exp.h"
#include "lanes.h"

namespace {

// outs: [parts, rows, dim]; lses: [parts, rows], -inf where a part saw no key; its row is ignored.
template <class T>
void merge(const T* outs, const float* lses, T* out, float* lse, int64_t parts, int64_t rows, int64_t dim) {
    std::vector<float> weights(parts);
    for (int64_t row = 0; row < rows; row++, out += dim) {
        float top = -INF;
        for (int64_t part = 0; part < parts; part++) top = std::fmax(top, lses[part * rows + row]);
        float total = 0.0f;
        for (int64_t part = 0; part < parts; part++) {
            const float log = lses[part * rows + row];
            weights[part] = log == -INF ? 0.0f : std::exp(log - top);
            total += weights[part];
        }
        lse[row] = total == 0.0f ? -INF : top + std::log(total);
        const float scale = total == 0.0f ? 0.0f : 1.0f / total;
        for_vectors(dim, [&](int64_t d, int n) {
            vf sum = splat(0.0f);
            for (int64_t part = 0; part < parts; part++)
                if (weights[part] != 0.0f)
                    sum += load_some(outs + (part * rows + row) * dim + d, n) * (weights[part] * scale);
            store_some(out + d, sum, n);
        });
    }
}

}  // namespace

#define MP_MERGE(T, NAME)                                                                                     \
    MP_EXPORT void merge_##NAME(const T* outs, const float* lses, T* out, float* lse, int64_t parts,          \
                                int64_t rows, int64_t dim) {                                                  \
        merge(outs, lses, out, lse, parts, rows, dim);                                                        \
    }

MP_FOR_DTYPES(MP_MERGE)
