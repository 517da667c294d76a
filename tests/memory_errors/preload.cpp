// To be preloaded, before torch is there: what the guard allocator cannot do from inside.
//
// - A bad address that is given to the kernel becomes fatal. The kernel does not fault on memory that nobody may touch:
//   it returns EFAULT, and gloo takes that for a lost connection. So a message that arrives in freed memory would go
//   unnoticed.
// - Storages that Python makes, `torch.UntypedStorage(n)`, use the guard allocator, too. torch gives them the allocator
//   that it was built with, whatever was set.

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <initializer_list>

namespace {

template <class Function>
Function original(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

ssize_t checked(const char* name, ssize_t result) {
  if (result == -1 && errno == EFAULT) {
    for (const char* text : {name, ": bad address: a message lies in memory that was freed\n"})
      (void)!write(STDERR_FILENO, text, strlen(text));
    abort();
  }
  return result;
}

void* default_allocator = nullptr;

}  // namespace

extern "C" {

void set_default_cpu_allocator(void* allocator) { default_allocator = allocator; }

// c10::Allocator* c10::GetDefaultCPUAllocator()
void* _ZN3c1022GetDefaultCPUAllocatorEv() {
  if (default_allocator != nullptr) return default_allocator;
  return original<void* (*)()>("_ZN3c1022GetDefaultCPUAllocatorEv")();
}

ssize_t recv(int fd, void* data, size_t nbytes, int flags) {
  static const auto call = original<ssize_t (*)(int, void*, size_t, int)>("recv");
  return checked("recv", call(fd, data, nbytes, flags));
}

ssize_t send(int fd, const void* data, size_t nbytes, int flags) {
  static const auto call = original<ssize_t (*)(int, const void*, size_t, int)>("send");
  return checked("send", call(fd, data, nbytes, flags));
}

ssize_t readv(int fd, const iovec* parts, int count) {
  static const auto call = original<ssize_t (*)(int, const iovec*, int)>("readv");
  return checked("readv", call(fd, parts, count));
}

ssize_t writev(int fd, const iovec* parts, int count) {
  static const auto call = original<ssize_t (*)(int, const iovec*, int)>("writev");
  return checked("writev", call(fd, parts, count));
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static const auto call = original<ssize_t (*)(int, msghdr*, int)>("recvmsg");
  return checked("recvmsg", call(fd, message, flags));
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto call = original<ssize_t (*)(int, const msghdr*, int)>("sendmsg");
  return checked("sendmsg", call(fd, message, flags));
}
}
