/* A disk that hangs, for the one process that this is preloaded into: what it opens or writes below the
 * folder DISK waits for as long as the file DISK_HANGS is there. DISK_BLOCKS is made by the first that does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *disk, *hangs, *blocks;
static int (*real_open)(const char *, int, ...);
static ssize_t (*real_write)(int, const void *, size_t);

__attribute__((constructor)) static void begin(void) {
    disk = getenv("DISK"), hangs = getenv("DISK_HANGS"), blocks = getenv("DISK_BLOCKS");
    real_open = dlsym(RTLD_NEXT, "open64");
    real_write = dlsym(RTLD_NEXT, "write");
    unsetenv("LD_PRELOAD");  /* its children have disks that work */
}

static void wait_for(const char *path) {
    if (strncmp(path, disk, strlen(disk))) return;
    while (!access(hangs, F_OK)) {
        close(real_open(blocks, O_CREAT | O_WRONLY, 0644));
        usleep(10000);
    }
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = flags & O_CREAT ? va_arg(more, int) : 0;
    va_end(more);
    wait_for(path);
    return real_open(path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t size) {
    char link[32], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0) wait_for(path);
    return real_write(fd, data, size);
}
