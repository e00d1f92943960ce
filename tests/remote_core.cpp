// The native core without Python, for another processor: serves remote_native.py over stdin and stdout, so that the kernel
// tests run on a core built for ARM under an emulator. It trusts its input; both ends belong to one test.
// A request is its number and its fields; the answer is one array of bytes, after its length. Everything is little-endian.
#include <stdio.h>
#include <string.h>

#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/limits.h"
#include "engine/model_ops.h"
#include "storage/store.h"

namespace {

constexpr uint64_t kNone = UINT64_MAX;
using Bytes = std::vector<uint8_t>;

std::map<uint64_t, std::unique_ptr<tc::Arena>> arenas;
std::vector<std::unique_ptr<tc::Context>> contexts;

struct Request {
    std::deque<Bytes> arrays;  // what the pointers of this request point into

    void bytes(void* to, size_t n) {
        if (fread(to, 1, n, stdin) != n) throw std::runtime_error("the request ends early");
    }
    template <class T = uint64_t>
    T number() {
        T x;
        bytes(&x, sizeof x);
        return x;
    }
    float real() { return number<float>(); }
    Bytes& array() {
        arrays.emplace_back(number());
        bytes(arrays.back().data(), arrays.back().size());
        return arrays.back();
    }
    template <class T>
    T* values() {  // null: not given
        const uint64_t given = number();
        return given ? reinterpret_cast<T*>(array().data()) : nullptr;
    }
    std::string text() {
        const Bytes& b = array();
        return std::string(b.begin(), b.end());
    }
    tc::Matrix matrix() {
        const uint64_t arena = number(), offset = number();
        const auto format = tc::Format(number());
        const size_t rows = number(), cols = number(), stride = number(), group = number();
        if (arena == kNone) return {};
        return {arenas.at(arena)->data + offset, format, rows, cols, stride, group};
    }
    tc::Linear linear() {
        const tc::Matrix w = matrix();
        return {w, values<const float>()};
    }
    tc::Norm norm() {
        const float *weight = values<const float>(), *bias = values<const float>();
        const float eps = real();
        return {weight, bias, eps, number() != 0};
    }
    tc::Join join() {
        const tc::Norm n = norm();
        const float scale = real();
        return {n, scale, real()};
    }
    tc::Heads heads() {
        const size_t n = number(), n_kv = number(), dim = number(), window = number();
        const float scale = real(), softcap = real();
        const float *q_norm = values<const float>(), *k_norm = values<const float>();
        const float eps = real();
        const auto* sinks = values<const float>();
        const bool whole_norms = number(), norms_last = number();
        tc::Heads h{n, n_kv, dim, window, scale, softcap, q_norm, k_norm, eps, sinks, whole_norms, norms_last};
        h.v_norm = values<const float>();
        h.shares = number(), h.own_norms = number(), h.chunked = number(), h.value_dim = number();
        h.temperature = real(), h.temperature_span = real();
        return h;
    }
    tc::Step step() {
        const int32_t *positions = values<int32_t>(), *sequence = values<int32_t>(), *table = values<int32_t>();
        const float *cos = values<const float>(), *sin = values<const float>();
        const size_t tokens = number(), block = number(), width = number(), rotary = number();
        return {positions, sequence, table, cos, sin, tokens, block, width, rotary};
    }
    tc::Attention attention() {
        const tc::Norm n = norm();
        tc::Stack qkv = {};
        for (uint64_t parts = number(); parts; parts--) qkv.parts.push_back(matrix());
        qkv.bias = values<const float>();
        const tc::Linear out = linear();
        const tc::Heads h = heads();
        const tc::Norm sub = norm();
        const tc::Join how = join();
        const tc::Matrix gate = matrix();
        return {n, qkv, out, h, sub, how, gate, latent()};
    }
    tc::Latent latent() {
        const size_t nope = number(), rope = number(), rank = number(), value = number();
        const tc::Norm q_norm = norm(), kv_norm = norm();
        const tc::Matrix q_b = matrix(), k_b = matrix();
        return {nope, rope, rank, value, q_norm, kv_norm, q_b, k_b, matrix()};
    }
    tc::FFN ffn() {
        const tc::Norm n = norm();
        const tc::Linear gate = linear();
        const tc::Matrix up = matrix(), down = matrix();
        const float* bias = values<const float>();
        const auto activation = tc::Activation(number());
        const float threshold = real();
        const bool up_relu = number(), bundles = number();
        const tc::Norm sub = norm();
        const tc::Join how = join();
        const tc::Matrix first = matrix(), second = matrix();
        const float* least = values<const float>();
        const size_t hot = number();
        const bool relu = number();
        const float* up_bias = values<const float>();
        const float alpha = real();
        const tc::Predictor guess = {first, second, least, hot, relu};
        return {n, gate, up, down, bias, activation, threshold, up_relu, bundles, sub, how, guess, nullptr, nullptr, up_bias, alpha, real()};
    }
};

template <class... Parts>
Bytes joined(const Parts&... parts) {
    Bytes out;
    (out.insert(out.end(), parts.begin(), parts.end()), ...);
    return out;
}
Bytes number(uint64_t x) {
    const auto* p = reinterpret_cast<const uint8_t*>(&x);
    return Bytes(p, p + sizeof x);
}
template <class T>
Bytes array_of(size_t n) { return Bytes(n * sizeof(T)); }
float* floats(Bytes& b) { return reinterpret_cast<float*>(b.data()); }

// Keys and values: what the binding's KVPages has, and their bytes, which are sent back.
struct Cache {
    tc::CachePages k, v;
    Bytes &keys, &values;
    static Cache of(Request& r) {
        const auto k_type = tc::CacheType(r.number()), v_type = tc::CacheType(r.number());
        const size_t heads = r.number(), dim = r.number(), block = r.number();
        Bytes &k = r.array(), &v = r.array();
        return {pages(k, k_type, heads, dim, block), pages(v, v_type, heads, dim, block), k, v};
    }
    static tc::CachePages pages(Bytes& b, tc::CacheType type, size_t heads, size_t dim, size_t block) {
        const size_t bytes = tc::cache_page_bytes(type, dim, block);
        return {b.data(), type, b.size() / (bytes * heads), heads, bytes};
    }
};

Bytes levels() {
    std::string names;
    for (size_t i = 0; const char* level = tc::isa_level(i); i++)
        if (tc::kernels_named(level)) names += std::string(names.empty() ? "" : " ") + level;
    return Bytes(names.begin(), names.end());
}

Bytes memory(const std::string& what, Request& r) {
    const uint64_t id = r.number();
    if (what == "arena") {
        arenas[id] = std::make_unique<tc::Arena>(r.number());
        return number(arenas[id]->data != nullptr);
    }
    if (what == "free") return arenas.erase(id), Bytes();
    tc::Arena& arena = *arenas.at(id);
    if (what == "fence") return number(arena.fence());
    const uint64_t offset = r.number();  // write
    const Bytes& data = r.array();
    return memcpy(arena.data + offset, data.data(), data.size()), Bytes();
}

Bytes op(const std::string& what, tc::Context& c, Request& r) {
    if (what == "embed") {
        const tc::Matrix w = r.matrix();
        const Bytes& ids = r.array();
        Bytes out = array_of<float>(ids.size() / 4 * w.cols);
        return c.embed(w, reinterpret_cast<const int32_t*>(ids.data()), ids.size() / 4, floats(out)), out;
    }
    if (what == "interleaves") return number(c.k.interleaves);
    if (what == "group") return number(size_t(c.k.panel_rows));
    if (what == "interleaved") {
        tc::Arena& arena = *arenas.at(r.number());
        const tc::Matrix w = r.matrix();
        return number(c.interleaved(w, arena.data + (w.data - arena.data)).group);
    }
    if (what == "norm") {
        const tc::Norm n = r.norm();
        Bytes& x = r.array();
        const size_t dim = r.number();
        Bytes out(x.size());
        return c.norm(n, floats(x), x.size() / 4 / dim, dim, floats(out)), out;
    }
    if (what == "matmul") {
        const tc::Linear w = r.linear();
        Bytes &x = r.array(), &out = r.array();
        const size_t tokens = x.size() / 4 / w.weight.cols;
        return c.matmul(w, {}, floats(x), tokens, floats(out), r.number() != 0), out;
    }
    if (what == "attention") {
        const tc::Heads h = r.heads();
        const tc::Step s = r.step();
        const Cache cache = Cache::of(r);
        Bytes& qkv = r.array();
        Bytes out = array_of<float>(s.tokens * h.n * h.dim);
        c.attention({h, s, cache.k, cache.v, floats(qkv), floats(out)});
        return joined(cache.keys, cache.values, qkv, out);
    }
    if (what == "attention_add") {
        const tc::Attention a = r.attention();
        const tc::Step s = r.step();
        const Cache cache = Cache::of(r);
        Bytes &x = r.array(), &h = r.array();
        c.attention_add(floats(x), floats(h), a, s, cache.k, cache.v);
        return joined(cache.keys, cache.values, x);
    }
    if (what == "per_layer_add") {
        const tc::Matrix gate = r.matrix(), down = r.matrix();
        const auto activation = tc::Activation(r.number());
        const tc::PerLayer layer = {gate, down, activation, r.join()};
        Bytes &x = r.array(), &given = r.array();
        return c.per_layer_add(floats(x), layer, floats(given), given.size() / 4 / gate.rows), x;
    }
    const tc::FFN f = r.ffn();
    Bytes &x = r.array(), &h = r.array();
    const size_t dim = f.gate.weight.cols;
    const auto sparsity = tc::Sparsity(r.number());
    const size_t tokens = x.size() / 4 / dim;
    Bytes record = array_of<float>(r.number() ? tokens * f.gate.weight.rows : 0);
    const tc::FFNCounts n = c.ffn_add({f, floats(x), floats(h), tokens, dim, sparsity, record.empty() ? nullptr : floats(record)});
    return joined(x, record, number(n.active), number(n.rows), number(n.rows_dense), number(n.gates), number(n.predictor_bytes));
}

Bytes answer(const std::string& what, Request& r) {
    if (what == "levels") return levels();
    if (what == "limits") {
        const tc::Limits own = tc::limits();
        return joined(number(own.arena_padding), number(own.few_tokens), number(own.page_run));
    }
    if (what == "cache_page_bytes") {
        const auto type = tc::CacheType(r.number());
        const size_t dim = r.number();
        return number(tc::cache_page_bytes(type, dim, r.number()));
    }
    if (what == "crc32c") {
        const Bytes& data = r.array();
        return number(tc::crc32c(data.data(), data.size(), uint32_t(r.number())));
    }
    if (what == "context") {
        const uint64_t threads = r.number();
        const std::string isa = r.text();
        contexts.push_back(std::make_unique<tc::Context>(int(threads), tc::kernels_named(isa.c_str())));
        return number(contexts.size() - 1);
    }
    for (const char* name : {"arena", "free", "fence", "write"})
        if (what == name) return memory(what, r);
    tc::Context& c = *contexts.at(r.number());
    return op(what, c, r);
}

}  // namespace

int main() {
    for (int next; (next = getchar()) != EOF;) {
        ungetc(next, stdin);
        Request r;
        const std::string what = r.text();
        const Bytes out = answer(what, r), size = number(out.size());
        fwrite(size.data(), 1, size.size(), stdout);
        fwrite(out.data(), 1, out.size(), stdout);
        fflush(stdout);
    }
}
