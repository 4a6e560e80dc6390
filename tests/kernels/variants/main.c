/* Compares the kernels of every instruction set that this machine can run with plain C, bit for bit.
 *
 * isa.c is compiled once more as kernels_plain: without intrinsics and without the compiler's vectorizer. Its results,
 * on one thread, are what every usable table must give on one thread and on three. Inputs come from a fixed seed; the
 * checksum of all results that is printed at the end is therefore the same on every architecture.
 *
 * read_all and integer_multiply_add are left out: they measure the machine, and their sums mean nothing.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "pool.h"
#include "usable.h"

extern const struct kernels kernels_plain;

static const struct kernels *tables[MAX_TABLES];
static int num_tables, num_cases, num_failures;
static char running[200]; /* table and case, for report_fault */
static uint64_t checksum = 0xCBF29CE484222325u; /* FNV-1a */

/* Ends the program at an access beyond a fenced array, whose kernel and case it names. */
static void report_fault(int signal) {
    (void)signal;
    static const char what[] = ": touches memory beyond its arrays\n";
    if (write(STDOUT_FILENO, running, strlen(running)) < 0 || write(STDOUT_FILENO, what, sizeof what - 1) < 0) _exit(2);
    _exit(1);
}

static void set_running(const struct kernels *k, const char *what) {
    snprintf(running, sizeof running, "%s, threads %d: %s", k->name, pool_threads(), what);
}

void check(const char *what, call run, const void *arguments, void *out, size_t bytes) {
    uint8_t *expected = malloc(bytes);
    if (!expected) exit(2);
    memset(out, 0xFF, bytes); /* NaN */
    pool_set_threads(1);
    set_running(&kernels_plain, what);
    int failed = run(&kernels_plain, arguments);
    memcpy(expected, out, bytes);
    for (size_t i = 0; i < bytes; i++) checksum = (checksum ^ expected[i]) * 0x100000001B3u;
    for (int threads = 1; threads <= 3; threads += 2) {
        pool_set_threads(threads);
        for (int i = 0; i < num_tables; i++) {
            memset(out, 0xFF, bytes);
            set_running(tables[i], what);
            failed |= run(tables[i], arguments);
            if (!failed && memcmp(expected, out, bytes) == 0) continue;
            size_t at = 0;
            while (at < bytes && expected[at] == ((uint8_t *)out)[at]) at++;
            printf("%s: byte %zu of %zu differs from plain C\n", running, at, bytes);
            num_failures++;
        }
    }
    num_cases++;
    free(expected);
    release_fenced();
}

int main(void) {
    signal(SIGSEGV, report_fault);
    num_tables = usable_kernels(tables);
    check_matmul();
    check_ffn();
    check_latent();
    check_attend();
    check_indexer();
    check_route();
    check_elementwise();
    check_quantize();
    check_fp8();
    for (int i = 0; i < num_tables; i++) printf("%s%s", tables[i]->name, i + 1 < num_tables ? ", " : "");
    printf(": %d cases against plain C, %d results differ, checksum %016llx\n", num_cases, num_failures,
           (unsigned long long)checksum);
    return num_failures != 0;
}
