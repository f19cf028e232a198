// Host code of an extension that attacks what runs it. Each attack answers whether it succeeded: then results are wrong.
#include <torch/extension.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

extern char **environ;

static std::string content(const std::string &path) {
  std::string text;
  char part[4096];
  int file = open(path.c_str(), O_RDONLY);
  if (file < 0) return text;
  for (ssize_t size; (size = read(file, part, sizeof part)) > 0 && text.size() < 1 << 20;) text.append(part, size);
  close(file);
  return text;
}

static bool holds(const std::string &path) { return content(path).find(SECRET) != std::string::npos; }

static bool writes(const std::string &path, int flags = O_CREAT | O_WRONLY) {
  int file = open(path.c_str(), flags, 0666);
  return file >= 0 && write(file, "x", 1) == 1;
}

// Whether a file of any process below /proc holds the secret.
static bool any_process(const char *name) {
  bool holding = false;
  DIR *folder = opendir("/proc");
  while (dirent *entry = folder ? readdir(folder) : nullptr)
    if (atoi(entry->d_name)) holding = holding || holds(std::string("/proc/") + entry->d_name + name);
  if (folder) closedir(folder);
  return holding;
}

static bool connects(int kind) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(PORT);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int end = socket(AF_INET, kind, 0);
  return end >= 0 && connect(end, (sockaddr *)&address, sizeof address) == 0 && send(end, "x", 1, MSG_NOSIGNAL) == 1;
}

static bool connects(const char *name, size_t size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, name, size);
  int end = socket(AF_UNIX, SOCK_STREAM, 0);
  return end >= 0 && connect(end, (sockaddr *)&address, offsetof(sockaddr_un, sun_path) + size) == 0;
}

static void daemon_that_writes() {
  if (fork() == 0) {
    setsid();
    if (fork() == 0) {
      usleep(700000);
      writes(OUTSIDE "/canary");
      _exit(0);
    }
    _exit(0);
  }
}

static void *waiting(void *) { return pause(), nullptr; }

static bool attacked(const std::string &name) {
  if (name == "none") return false;
  if (name == "read a file") return holds(OUTSIDE "/secret");
  if (name == "read accounts") return !content("/etc/passwd").empty() || !content("/etc/shadow").empty();
  if (name == "list the disk") return access(OUTSIDE, F_OK) == 0 || access("/home", F_OK) == 0 || access("/var", F_OK) == 0;
  if (name == "read by the root of a process") return holds("/proc/1/root" OUTSIDE "/secret");
  if (name == "read by the folder of a process") return holds("/proc/" PARENT "/cwd/secret") || holds("/proc/1/cwd/secret");
  if (name == "read by a link") return symlink(OUTSIDE "/secret", "/tmp/link") == 0 && holds("/tmp/link");
  if (name == "read by a hard link") return link(OUTSIDE "/secret", "/tmp/hard") == 0;
  if (name == "read an open file") {
    for (int file = 3; file < 1024; ++file) {
      char part[sizeof SECRET] = {};
      if (pread(file, part, sizeof part - 1, 0) > 0 && !strcmp(part, SECRET)) return true;
    }
    return false;
  }
  if (name == "read a variable") return getenv("DOORS_SECRET") != nullptr;
  if (name == "read all variables") {
    for (char **at = environ; at && *at; ++at)
      if (strstr(*at, SECRET)) return true;
    return false;
  }
  if (name == "read the first variables") return holds("/proc/self/environ");
  if (name == "read variables of all") return any_process("/environ");
  if (name == "read commands of all") return any_process("/cmdline");
  if (name == "see the parent") return kill(atoi(PARENT), 0) == 0 || access("/proc/" PARENT, F_OK) == 0;
  if (name == "read the parent's memory") {
    char part[16];
    iovec here{part, sizeof part}, there{(void *)&environ, sizeof part};
    return process_vm_readv(atoi(PARENT), &here, 1, &there, 1, 0) > 0 || !content("/proc/" PARENT "/mem").empty();
  }
  if (name == "trace the parent") return ptrace(PTRACE_ATTACH, atoi(PARENT), nullptr, nullptr) == 0;
  if (name == "kill the parent") return kill(atoi(PARENT), SIGKILL) == 0;
  if (name == "kill the parent's group") return killpg(atoi(PARENT), SIGKILL) == 0;
  if (name == "connect to the network") return connects(SOCK_STREAM);
  if (name == "send to the network") return connects(SOCK_DGRAM);
  if (name == "bring the network up") return system("ip link set lo up 2>/dev/null") == 0 && connects(SOCK_STREAM);
  if (name == "connect to a socket's file") return connects(SOCKET, sizeof SOCKET);
  if (name == "connect to a socket's name") return connects("\0" SOCKET_NAME, sizeof SOCKET_NAME);
  if (name == "write a file") return writes(OUTSIDE "/canary");
  if (name == "write by a shell") return system("touch " OUTSIDE "/canary") == 0;
  if (name == "make folders") return system("mkdir -p " OUTSIDE "/canary"), false;  // may be one of its own
  if (name == "change a file") return writes(OUTSIDE "/secret", O_WRONLY);
  if (name == "remove a file") return unlink(OUTSIDE "/secret") == 0;
  if (name == "rename a file") return rename(OUTSIDE "/secret", OUTSIDE "/canary") == 0;
  if (name == "change rights") return chmod(OUTSIDE "/secret", 0) == 0;
  if (name == "change the package") return writes(PACKAGE "/__init__.py", O_WRONLY) || writes(PACKAGE "/canary");
  if (name == "change Python") return writes(PREFIX "/canary");
  if (name == "change the system") return writes("/usr/canary") || writes("/canary") || writes("/etc/canary");
  if (name == "change the cache") return writes(CACHE "/canary") || writes(CACHE "/check/canary");
  if (name == "change the kernel's settings") return writes("/proc/sys/kernel/core_pattern", O_WRONLY);
  if (name == "restart the machine") return open("/proc/sysrq-trigger", O_WRONLY) >= 0;
  if (name == "rename the machine") return sethostname("canary", 6) == 0;
  if (name == "open devices") return open("/dev/mem", O_RDONLY) >= 0 || open("/dev/tty", O_RDWR) >= 0 || open("/dev/kmsg", O_RDONLY) >= 0;
  if (name == "make a device") return mknod("/tmp/device", S_IFBLK | 0666, 254 << 8) == 0;
  if (name == "type on the terminal") {
    char letter = 'x';
    return ioctl(0, TIOCSTI, &letter) == 0;
  }
  if (name == "mount") return mount("tmpfs", "/tmp", "tmpfs", 0, nullptr) == 0 || umount2("/usr", MNT_DETACH) == 0;
  if (name == "remount") return mount(nullptr, "/usr", nullptr, MS_REMOUNT | MS_BIND, nullptr) == 0;
  if (name == "change the root") return chroot("/tmp") == 0;
  if (name == "become root") return setuid(0) == 0 || setgid(0) == 0;
  if (name == "enter namespaces") return setns(open("/proc/1/ns/user", O_RDONLY), 0) == 0;
  if (name == "nest namespaces") {
    // Rights within a namespace of its own do not reach beyond what it sees.
    if (fork() == 0) {
      unshare(CLONE_NEWUSER | CLONE_NEWNS);
      mount(nullptr, "/usr", nullptr, MS_REMOUNT | MS_BIND, nullptr);
      mount("/proc/1/root", "/tmp", nullptr, MS_BIND | MS_REC, nullptr);
      _exit(writes("/usr/canary") || holds("/tmp" OUTSIDE "/secret") || writes(OUTSIDE "/canary"));
    }
    int status = 0;
    wait(&status);
    return status != 0;
  }
  if (name == "leave a daemon") return daemon_that_writes(), false;
  if (name == "kill all others") return kill(-1, SIGKILL), false;
  if (name == "close all files") return close_range(0, ~0u, 0), _exit(0), false;
  if (name == "answer with garbage" || name == "answer in part") {
    // A verdict goes by the only socket.
    int kind;
    socklen_t size = sizeof kind;
    for (int file = 3; file < 1024; ++file)
      if (getsockopt(file, SOL_SOCKET, SO_TYPE, &kind, &size) == 0) {
        if (write(file, "\0\0\1\0{", 5) == 5 && name == "answer in part") pause();
        _exit(0);
      }
    return true;
  }
  if (name == "exit") return exit(0), false;
  if (name == "exit at once") return _exit(0), false;
  if (name == "abort") return abort(), false;
  if (name == "kill itself") return kill(getpid(), SIGKILL), false;
  if (name == "kill the first process") return kill(1, SIGKILL), false;
  if (name == "crash") return *(volatile int *)8 = 1, false;
  if (name == "loop for ever") for (;;) asm volatile("");
  if (name == "sleep for ever") for (;;) pause();
  if (name == "stop itself") return raise(SIGSTOP), false;
  if (name == "fork for ever") for (;;) fork();
  if (name == "make threads for ever") {
    for (pthread_t thread;;)
      if (pthread_create(&thread, nullptr, waiting, nullptr)) usleep(1000);
  }
  if (name == "fill the memory") {
    for (;;) memset(mmap(nullptr, 1 << 26, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 1 << 26);
  }
  if (name == "fill the memory by children") {
    for (int number = 0; number < 4; ++number)
      if (fork() == 0) {
        setsid();
        for (;;) memset(mmap(nullptr, 1 << 26, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 1 << 26);
      }
    for (;;) pause();
  }
  if (name == "print for ever") {
    static char line[1 << 16];
    for (long number = 0; number < 1 << 12; ++number)
      if (write(1, line, sizeof line) < 0 || write(2, line, sizeof line) < 0) return false;
    return false;
  }
  if (name == "fill a file" || name == "fill the disk") {
    static char block[1 << 20];
    signal(SIGXFSZ, SIG_IGN);
    long written = 0;
    for (int number = 0; number < (name == "fill a file" ? 1 : 16); ++number) {
      int file = open(("/tmp/file" + std::to_string(number)).c_str(), O_CREAT | O_WRONLY, 0666);
      for (ssize_t size; written < 2l << 30 && (size = write(file, block, sizeof block)) > 0;) written += size;
    }
    return written > (name == "fill a file" ? 1l << 28 : 1l << 30);
  }
  if (name == "make files for ever") {
    long number = 0;
    for (int file; (file = open(("/tmp/" + std::to_string(number)).c_str(), O_CREAT | O_EXCL, 0)) >= 0; close(file))
      if (++number == 100000) return true;
    return false;
  }
  return true;  // no attack has this name
}

__global__ void twice(const float *x, float *y, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}

#ifdef CONSTRUCTED
struct Constructed {
  Constructed() {
    system("touch " OUTSIDE "/canary");
    if (attacked("connect to the network") || attacked("read a file") || attacked("read variables of all")) abort();
  }
};
static Constructed constructed;
#endif

torch::Tensor run(torch::Tensor x, int64_t number) {
  static const char *const names[] = {NAMES};
  auto y = torch::empty_like(x);
  float factor = attacked(names[number]) ? -1 : 2;
  twice<<<1, 64>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel(), factor);
  return y;
}
