// A stand-in for NVRTC: what it compiles comes back as it was. It is no compiler: whether NVRTC takes the source only
// NVRTC can say. See standin.h.
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct program {
    char *source;
    int compiled;
};

static const char LOG[] = "the stand-in was told to refuse it";
static int refuses;

static void live(int by) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void (*live_by)(const char *, int) = library ? (void (*)(const char *, int))dlsym(library, "standin_live_by") : NULL;
    if (live_by) live_by("programs", by);
    if (library) dlclose(library);
}

int nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 8;
    return 0;
}

int nvrtcCreateProgram(struct program **to, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    (void)name, (void)texts, (void)names;
    if (headers) return 3;
    struct program *program = calloc(1, sizeof *program);
    program->source = strdup(source);
    *to = program;
    live(1);
    return 0;
}

int nvrtcCompileProgram(struct program *program, int options, const char *const *texts) {
    (void)options, (void)texts;
    program->compiled = !refuses && strstr(program->source, "extern \"C\" __global__");
    return program->compiled ? 0 : 6;
}

int nvrtcGetPTXSize(struct program *program, size_t *size) {
    *size = strlen(program->source) + 1;
    return program->compiled ? 0 : 4;
}

int nvrtcGetPTX(struct program *program, char *to) {
    if (!program->compiled) return 4;
    strcpy(to, program->source);
    return 0;
}

int nvrtcGetProgramLogSize(struct program *program, size_t *size) {
    *size = program->compiled ? 1 : sizeof LOG;
    return 0;
}

int nvrtcGetProgramLog(struct program *program, char *to) {
    strcpy(to, program->compiled ? "" : LOG);
    return 0;
}

int nvrtcDestroyProgram(struct program **program) {
    free((*program)->source);
    free(*program);
    live(-1);
    return 0;
}

const char *nvrtcGetErrorString(int code) { return code ? "an error of the stand-in" : "NVRTC_SUCCESS"; }

// What tests say.
void standin_refuse(int all) { refuses = all; }
