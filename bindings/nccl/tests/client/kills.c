/* A rank that is killed in its initialisation, at one of the calls that pass descriptors, those of the shared memory of
   devices and hosts; or at one of those by which ranks connect and authenticate each other. They are calls of this
   program, which has functions of the same names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "client.h"

/* The calls of each kind until the one that kills; 0 for none. */
static int descriptors_left, rendezvous_left;

static void step(int *left) {
    if (*left && __atomic_sub_fetch(left, 1, __ATOMIC_RELAXED) == 0) kill(getpid(), SIGKILL);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    step(&descriptors_left);
    return ((ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg"))(fd, message, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    step(&descriptors_left);
    return ((ssize_t (*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg"))(fd, message, flags);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    step(&rendezvous_left);
    return ((int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect"))(fd, address, length);
}

ssize_t send(int fd, const void *bytes, size_t length, int flags) {
    step(&rendezvous_left);
    return ((ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send"))(fd, bytes, length, flags);
}

/* The others get an error that names the killed rank, from the initialisation or after it. */
void killed_in_initialisation(void) {
    int victim = atoi(getenv("VICTIM"));
    ncclComm_t comm = NULL;
    if (rank == victim) *(getenv("IN_RENDEZVOUS") ? &rendezvous_left : &descriptors_left) = atoi(getenv("KILLED_AT"));
    ncclResult_t state = ncclCommInitRank(&comm, ranks, id, rank);
    if (rank == victim) {
        printf("INITIALISED\n");
        fflush(stdout);
        kill(getpid(), SIGKILL);
    }
    if (state != ncclSuccess) {
        CHECK(state == ncclRemoteError);
        CHECK(names_rank(NULL, victim));
        return;
    }
    while (state == ncclSuccess) {
        usleep(1000);
        OK(ncclCommGetAsyncError(comm, &state));
    }
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(comm, victim));
    OK(ncclCommAbort(comm));
}
