/* Reductions of cells in single precision, in rank order, so that all ranks get equal bits. */
#ifndef GC_NUMBERS_CUH
#define GC_NUMBERS_CUH

#include <cells.cuh>

struct Float32 {
    using Bits = u32;
    DEVICE static float widen(u32 bits) { return float_of_bits(bits); }
    DEVICE static u32 narrow(float value) { return bits_of_float(value); }
};

struct Float16 {
    using Bits = u16;
    DEVICE static float widen(u16 bits) { return float_of_float16(bits); }
    DEVICE static u16 narrow(float value) { return float16_of_float(value); }
};

struct BFloat16 {
    using Bits = u16;
    DEVICE static float widen(u16 bits) { return float_of_bits(static_cast<u32>(bits) << 16); }
    DEVICE static u16 narrow(float value) { return bfloat16_of_float(value); }
};

/* The numbers of one cell. */
template <typename Number>
class Total {
  public:
    DEVICE explicit Total(Vector cell) {
        UNROLL for (u32 k = 0; k < COUNT; k++) values_[k] = item(cell, k);
    }

    /* Propagates NaN. */
    DEVICE void add(u32 op, Vector cell) {
        switch (op) {
            case OP_PRODUCT: return fold(cell, product_of);
            case OP_MIN:
                return fold(cell, [](float a, float b) { return is_less(b, a) || b != b ? b : a; });
            case OP_MAX:
                return fold(cell, [](float a, float b) { return is_less(a, b) || b != b ? b : a; });
            default: return fold(cell, sum_of); /* also averages */
        }
    }

    DEVICE void scale(float factor) {
        UNROLL for (u32 k = 0; k < COUNT; k++) values_[k] = product_of(values_[k], factor);
    }

    /* Returns `sum` plus the squares of all numbers. */
    DEVICE float add_squares(float sum) const {
        UNROLL for (u32 k = 0; k < COUNT; k++)
            sum = sum_of(sum, product_of(values_[k], values_[k]));
        return sum;
    }

    DEVICE Vector result(u32 op, u32 ranks) const {
        Vector cell = {0, 0};
        UNROLL for (u32 k = 0; k < COUNT; k++) {
            float value = values_[k];
            if (op == OP_AVG) value = quotient_of(value, static_cast<float>(ranks));
            u64 bits = static_cast<u64>(Number::narrow(value)) << shift(k);
            (k < COUNT / 2 ? cell.low : cell.high) |= bits;
        }
        return cell;
    }

  private:
    using Bits = typename Number::Bits;
    static constexpr u32 COUNT = CELL / sizeof(Bits);
    float values_[COUNT];

    template <typename Combine>
    DEVICE void fold(Vector cell, Combine combine) {
        UNROLL for (u32 k = 0; k < COUNT; k++) values_[k] = combine(values_[k], item(cell, k));
    }

    DEVICE static u32 shift(u32 k) { return k % (COUNT / 2) * 8 * sizeof(Bits); }

    DEVICE static float item(Vector cell, u32 k) {
        return Number::widen(static_cast<Bits>((k < COUNT / 2 ? cell.low : cell.high) >> shift(k)));
    }
};

/* Loads the first `size` bytes of a cell, in whole numbers. */
template <typename Number>
DEVICE Vector load_cell(const char *from, u64 size) {
    using Bits = typename Number::Bits;
    if (fits(address_of(from) | size, CELL)) return *reinterpret_cast<const Vector *>(from);
    Vector cell = {0, 0};
    UNROLL for (u32 at = 0; at < CELL; at += sizeof(Bits)) {
        u64 bits = at < size ? *reinterpret_cast<const Bits *>(from + at) : 0;
        (at < CELL / 2 ? cell.low : cell.high) |= bits << at % (CELL / 2) * 8;
    }
    return cell;
}

template <typename Number>
DEVICE void store_cell(char *to, Vector cell, u64 size) {
    using Bits = typename Number::Bits;
    if (fits(address_of(to) | size, CELL)) {
        *reinterpret_cast<Vector *>(to) = cell;
        return;
    }
    UNROLL for (u32 at = 0; at < CELL; at += sizeof(Bits)) {
        u64 half = at < CELL / 2 ? cell.low : cell.high;
        if (at < size)
            *reinterpret_cast<Bits *>(to + at) = static_cast<Bits>(half >> at % (CELL / 2) * 8);
    }
}

#endif
