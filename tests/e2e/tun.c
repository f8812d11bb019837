/* A tunnel interface that goes nowhere, for programs that want one before they say a word: what is tested is whether their
   words get out. Preloaded, it needs neither the device nor the privilege. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static int tun[2] = {-1, -1};

int open(const char *path, int flags, ...) {
  int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
  va_list more;
  va_start(more, flags);
  int mode = va_arg(more, int);
  va_end(more);
  if (strcmp(path, "/dev/net/tun") != 0) return next(path, flags, mode);
  return socketpair(AF_UNIX, SOCK_DGRAM, 0, tun) == 0 ? tun[0] : -1;
}

int ioctl(int fd, unsigned long request, ...) {
  int (*next)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
  va_list more;
  va_start(more, request);
  void *argument = va_arg(more, void *);
  va_end(more);
  return fd == tun[0] && request == TUNSETIFF ? 0 : next(fd, request, argument);
}

/* Programs set up its address with commands. */
int system(const char *command) { return command == NULL; }
