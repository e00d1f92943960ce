// llama.cpp, loaded once and asked for one test per line of stdin: `bench/llamacpp/vs_llamacpp.py` builds and drives it.
// A test is what tools/llama-bench does: the same calls, batch sizes and threadpool, without its loading.
//
//   llama-driver MODEL.gguf TOKENS.i32 N_CTX MMAP(0|1) REPACK(0|1) [GPU_LAYERS]
//   run THREADS FLASH(0|1) DEPTH PROMPT GEN   -> {"ns": ...}         after DEPTH tokens, which are kept between runs
//   first THREADS FLASH PROMPT                -> {"ns": ..., "token": ...}   the likeliest token after the prompt
//   logits THREADS FLASH PROMPT GEN FILE      -> {"rows": GEN + 1}   f32 logits after the prompt and each token
//   peak                                      -> {"peak_rss_bytes": ...}
//
// With EARLY_2025 it is compiled against the llama.cpp of that time, as PowerInfer's engine carries it: no REPACK.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"

static const int kBatch = 2048, kUbatch = 512;  // llama-bench's defaults

struct Driver {
    llama_model * model = nullptr;
    llama_context * ctx = nullptr;
    ggml_threadpool * pool = nullptr;
    std::vector<llama_token> tokens;
    int n_ctx = 0, threads = 0, flash = -1;
    int computed = 0;  // positions of tokens[0..] whose keys and values are there
};

static void fail(const std::string & why) {
    fprintf(stderr, "llama-driver: %s\n", why.c_str());
    exit(1);
}

static std::vector<llama_token> read_tokens(const char * path) {
    std::ifstream f(path, std::ios::binary | std::ios::ate);
    if (!f) fail(std::string("cannot read ") + path);
    std::vector<llama_token> tokens(size_t(f.tellg()) / sizeof(llama_token));
    f.seekg(0);
    f.read(reinterpret_cast<char *>(tokens.data()), std::streamsize(tokens.size() * sizeof(llama_token)));
    return tokens;
}

static void use(Driver & d, int threads, int flash) {
    if (flash != d.flash) {
        if (d.ctx) llama_free(d.ctx);
        llama_context_params p = llama_context_default_params();
        p.n_ctx = uint32_t(d.n_ctx);
        p.n_batch = kBatch;
        p.n_ubatch = kUbatch;
#ifdef EARLY_2025
        p.flash_attn = flash != 0;
#else
        p.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
#endif
        p.swa_full = false;
        d.ctx = llama_init_from_model(d.model, p);
        if (!d.ctx) fail("no context");
        d.flash = flash;
        d.computed = d.threads = 0;
    }
    if (threads != d.threads) {
        ggml_threadpool_params p = ggml_threadpool_params_default(threads);
        ggml_threadpool * pool = ggml_threadpool_new(&p);
        if (!pool) fail("no thread pool");
        llama_attach_threadpool(d.ctx, pool, nullptr);
        if (d.pool) ggml_threadpool_free(d.pool);
        d.pool = pool;
        d.threads = threads;
        llama_set_n_threads(d.ctx, threads, threads);
    }
}

// tokens[first, last) in batches, as llama-bench's test_prompt.
static void prompt(Driver & d, int first, int last) {
    for (int at = first; at < last; at += kBatch) {
        const int n = std::min(kBatch, last - at);
        if (llama_decode(d.ctx, llama_batch_get_one(d.tokens.data() + at, n)) != 0) fail("decode failed");
    }
    llama_synchronize(d.ctx);
}

static void token(Driver & d, int at) {
    if (llama_decode(d.ctx, llama_batch_get_one(d.tokens.data() + at, 1)) != 0) fail("decode failed");
    llama_synchronize(d.ctx);
}

// The cache holds exactly `depth` positions: what is beyond goes, what is missing is computed.
static void go_to(Driver & d, int depth) {
    if (d.computed > depth) {
#ifdef EARLY_2025
        llama_kv_self_seq_rm(d.ctx, 0, depth, -1);
#else
        llama_memory_seq_rm(llama_get_memory(d.ctx), 0, depth, -1);
#endif
        d.computed = depth;
    }
    prompt(d, d.computed, depth);
    d.computed = depth;
}

static long long run(Driver & d, int depth, int n_prompt, int n_gen) {
    go_to(d, depth);
    token(d, depth);  // the threads are awake now, as they are in the other engine's run
    d.computed = depth + 1;
    go_to(d, depth);
    const auto begin = std::chrono::steady_clock::now();
    prompt(d, depth, depth + n_prompt);
    for (int i = 0; i < n_gen; i++) token(d, depth + n_prompt + i);
    const auto end = std::chrono::steady_clock::now();
    d.computed = depth + n_prompt + n_gen;
    go_to(d, depth);
    return std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
}

static int likeliest(Driver & d) {
    const float * logits = llama_get_logits_ith(d.ctx, -1);
    const int n = llama_vocab_n_tokens(llama_model_get_vocab(d.model));
    return int(std::max_element(logits, logits + n) - logits);
}

static void write_logits(Driver & d, int n_prompt, int n_gen, const std::string & path) {
    const size_t n = size_t(llama_vocab_n_tokens(llama_model_get_vocab(d.model)));
    std::ofstream f(path, std::ios::binary);
    const auto append = [&] {
        f.write(reinterpret_cast<const char *>(llama_get_logits_ith(d.ctx, -1)), std::streamsize(n * sizeof(float)));
    };
    go_to(d, 0);
    prompt(d, 0, n_prompt);
    append();
    for (int i = 0; i < n_gen; i++) {
        token(d, n_prompt + i);
        append();
    }
    d.computed = n_prompt + n_gen;
}

static long long peak_rss_bytes() {
    std::ifstream f("/proc/self/status");
    for (std::string line; std::getline(f, line);) {
        if (line.rfind("VmHWM:", 0) == 0) return atoll(line.c_str() + 6) * 1024;
    }
    return 0;
}

int main(int argc, char ** argv) {
    if (argc != 6 && argc != 7) fail("usage: llama-driver MODEL TOKENS N_CTX MMAP REPACK [GPU_LAYERS]");
    Driver d;
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    d.tokens = read_tokens(argv[2]);
    d.n_ctx = atoi(argv[3]);
    llama_model_params p = llama_model_default_params();
#ifdef EARLY_2025
    p.use_mmap = atoi(argv[4]) != 0;
#else
    p.load_mode = atoi(argv[4]) ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    p.use_extra_bufts = atoi(argv[5]) != 0;
#endif
    p.n_gpu_layers = argc > 6 ? atoi(argv[6]) : 0;
    const auto begin = std::chrono::steady_clock::now();
    d.model = llama_model_load_from_file(argv[1], p);
    if (!d.model) fail("cannot load the model");
    const double load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    printf("{\"load_s\": %.3f, \"system\": \"%s\"}\n", load_s, llama_print_system_info());
    fflush(stdout);

    char line[4096], path[4000];
    int threads, flash, depth, n_prompt, n_gen;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "run %d %d %d %d %d", &threads, &flash, &depth, &n_prompt, &n_gen) == 5) {
            use(d, threads, flash);
            printf("{\"ns\": %lld}\n", run(d, depth, n_prompt, n_gen));
        } else if (sscanf(line, "first %d %d %d", &threads, &flash, &n_prompt) == 3) {
            const auto start = std::chrono::steady_clock::now();
            use(d, threads, flash);
            go_to(d, n_prompt);
            const int id = likeliest(d);
            const auto ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
            printf("{\"ns\": %lld, \"token\": %d}\n", (long long) ns, id);
        } else if (sscanf(line, "logits %d %d %d %d %3999[^\n]", &threads, &flash, &n_prompt, &n_gen, path) == 5) {
            use(d, threads, flash);
            write_logits(d, n_prompt, n_gen, path);
            printf("{\"rows\": %d}\n", n_gen + 1);
        } else if (strncmp(line, "peak", 4) == 0) {
            printf("{\"peak_rss_bytes\": %lld}\n", peak_rss_bytes());
        } else {
            fail(std::string("what is ") + line);
        }
        fflush(stdout);
    }
}
