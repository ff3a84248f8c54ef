// Scratch memory that begins on a cache line: a vector that lies across two of them is read and written at half speed.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), LINE); }
    void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
    template <class U>
    bool operator==(const LineAllocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const LineAllocator<U>&) const { return false; }
};

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;
