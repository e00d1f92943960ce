#include "slots.h"

namespace tc {

SlotPool::SlotPool(uint8_t* data, size_t stride, size_t slots, size_t n_passing)
    : data(data), stride(stride), slots(slots), lent(slots - n_passing) {
    for (size_t i = lent; i < slots; i++) passing.push_back({int32_t(i), -1, false, false});
    for (size_t i = passing.size(); i-- > 0;) idle.push_back(int32_t(i));
}

int32_t SlotPool::take(size_t n) {
    if (n > lent - next_) return -1;
    next_ += n;
    return int32_t(next_ - n);
}

int32_t SlotPool::take_one() {
    if (returned_.empty()) return take(1);
    const int32_t slot = returned_.back();
    returned_.pop_back();
    return slot;
}

}  // namespace tc
