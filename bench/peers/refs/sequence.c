// A counter for each CPU, in C: only an add in a restartable sequence. It has no gate, so the counts could not be summed or the
// counter killed. `netmem-bench refs` builds this program, and its measurements take turns with those of netmem's own variants.
//
//   arguments                      the CPU to run on
//   standard input                 standard output
//                                  ready                        once
//   PAIRS                          NANOSECONDS CPU-NANOSECONDS  of all pairs of an add and a subtraction; the second is how long this
//                                                               thread ran
//
// The sequence is the usual one: descriptor, index, address, add. The index is mm_cid if the kernel has it, and the CPU's number
// otherwise, as in Netmem.
#define _GNU_SOURCE
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/rseq.h>
#include <time.h>

#ifndef __x86_64__
#error "the sequence is written for x86-64"
#endif

enum { CPUS = 4096, CPU_ID = 4, MM_CID = 24, FEATURE_SIZE = 27, LINE = 64 };

// A cache line for each CPU.
static struct { _Alignas(LINE) long n; } counter[CPUS];

static uint64_t now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Adds n to this CPU's word of the counter; an abort starts again. INDEX is where the area has the index.
#define ADD(INDEX, area, number)                                                                                                   \
    __asm__ __volatile__(                                                                                                          \
        ".pushsection __rseq_cs, \"aw\"\n\t.balign 32\n\t"                                                                         \
        "3:\n\t.long 0, 0\n\t.quad 4f, 5f - 4f, 6f\n\t.popsection\n\t"                                                             \
        "2:\n\tleaq 3b(%%rip), %%rax\n\tmovq %%rax, 8(%[a])\n\t"                                                                   \
        "4:\n\tmovl %c[index](%[a]), %%eax\n\tshlq $6, %%rax\n\taddq %[n], (%[c], %%rax)\n\t"                                      \
        "5:\n\t.pushsection __rseq_failure, \"ax\"\n\t.byte 0x0f, 0xb9, 0x3d\n\t.long 0x53053053\n\t"                              \
        "6:\n\tjmp 2b\n\t.popsection\n\t"                                                                                          \
        :: [a] "r"(area), [c] "r"(counter), [n] "r"((long)(number)), [index] "i"(INDEX) : "rax", "memory", "cc")

static void work(uint64_t pairs, int mm_cid)
{
    char *area = (char *)__builtin_thread_pointer() + __rseq_offset;
    if (mm_cid)
        for (uint64_t i = 0; i < pairs; i++) {
            ADD(MM_CID, area, 1);
            ADD(MM_CID, area, -1);
        }
    else
        for (uint64_t i = 0; i < pairs; i++) {
            ADD(CPU_ID, area, 1);
            ADD(CPU_ID, area, -1);
        }
}

int main(int argc, char **argv)
{
    // If the parent process ends, the kernel ends this one. If the parent has ended already, the input has ended, too.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(argc > 1 ? atoi(argv[1]) : 0, &cpus);
    if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) {
        perror("the CPU");
        return 1;
    }
    if (__rseq_size == 0) {
        fputs("the C library has registered no rseq area\n", stderr);
        return 1;
    }
    int mm_cid = getauxval(FEATURE_SIZE) >= MM_CID + 4;
    puts("ready");

    char line[128];
    uint64_t pairs;
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "%" SCNu64, &pairs) != 1) {
            fprintf(stderr, "not understood: %s", line);
            return 1;
        }
        work(pairs / 16 + 1, mm_cid);
        uint64_t cpu = now(CLOCK_THREAD_CPUTIME_ID), begin = now(CLOCK_MONOTONIC);
        work(pairs, mm_cid);
        uint64_t end = now(CLOCK_MONOTONIC);
        printf("%" PRIu64 " %" PRIu64 "\n", end - begin, now(CLOCK_THREAD_CPUTIME_ID) - cpu);
    }
    return 0;
}
