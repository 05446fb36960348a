/* Connections between two devices of this process, each with a thread of its own: connections */

#include "check.h"

#include <pthread.h>

enum { LENGTH = 4096, TIMEOUT_MS = 30000, SHORT_MS = 50 };

static doorbell_listener *listener;
static char address[32];

static doorbell_device *open_device(void) {
    doorbell_device *device;
    OK(doorbell_open("soft", &device));
    return device;
}

/* Sends its key, and is written to and read from. */
static void *server(void *unused) {
    doorbell_device *device = open_device();
    doorbell_connection *peer;
    OK(doorbell_accept(listener, device, TIMEOUT_MS, &peer));
    doorbell_memory *memory, *own;
    OK(doorbell_alloc(device, LENGTH, DOORBELL_PEER_READ_WRITE, &memory));
    /* Memory of the caller. */
    static doorbell_key key;
    OK(doorbell_register(device, &key, sizeof key, DOORBELL_LOCAL, &own));
    char *bytes = doorbell_address(memory);
    for (size_t i = 0; i < LENGTH; i++) {
        bytes[i] = (char)(i % 100);
    }
    OK(doorbell_get_key(memory, &key));
    FAILS(doorbell_get_key(own, &key), DOORBELL_INVALID_ARGUMENT, "has no key");
    OK(doorbell_post_receive(peer, memory, 0, 0));
    OK(doorbell_send(peer, own, 0, sizeof key, NULL, TIMEOUT_MS));

    doorbell_message message;
    OK(doorbell_receive(peer, TIMEOUT_MS, &message));
    EXPECT(message.is_write && message.length == 5 && message.has_immediate && message.immediate == 0xABCDEF01);
    EXPECT(memcmp(bytes + 1000, "words", 5) == 0 && bytes[999] == 99 && bytes[1005] == 5);

    /* Nothing is posted: the client waits, and gives up. */
    FAILS(doorbell_receive(peer, TIMEOUT_MS, &message), DOORBELL_PEER_FAILED, "disconnected");
    /* In any order. */
    OK(doorbell_close(device));
    OK(doorbell_free(memory));
    FAILS(doorbell_disconnect(peer), DOORBELL_PEER_FAILED, "closed");
    OK(doorbell_free(own));
    return unused;
}

static void *client(void *unused) {
    const doorbell_status invalid = DOORBELL_INVALID_ARGUMENT;
    doorbell_device *device = open_device();
    doorbell_connection *peer;
    OK(doorbell_connect(device, address, TIMEOUT_MS, &peer));
    doorbell_memory *memory;
    OK(doorbell_alloc(device, LENGTH, DOORBELL_PEER_READ, &memory));
    char *bytes = doorbell_address(memory);
    doorbell_message message;
    /* A time-out of a receive is no failure of the connection. */
    FAILS(doorbell_receive(peer, 0, &message), DOORBELL_TIMED_OUT, "no answer");
    OK(doorbell_post_receive(peer, memory, 64, 64));
    OK(doorbell_receive(peer, TIMEOUT_MS, &message));
    doorbell_key key, readable;
    EXPECT(message.data == bytes + 64 && message.length == sizeof key && !message.has_immediate && !message.is_write);
    memcpy(&key, message.data, sizeof key);

    OK(doorbell_read(peer, memory, 0, LENGTH, &key, 0, TIMEOUT_MS));
    for (size_t i = 0; i < LENGTH; i++) {
        EXPECT(bytes[i] == (char)(i % 100));
    }
    OK(doorbell_read(peer, memory, 100, 10, &key, 50, TIMEOUT_MS));
    EXPECT(bytes[99] == 99 && bytes[100] == 50 && bytes[109] == 59 && bytes[110] == 10);

    /* What is refused has begun nothing. */
    FAILS(doorbell_write(peer, memory, LENGTH, 1, &key, 0, NULL, 0), invalid, "beyond the memory's end");
    FAILS(doorbell_write(peer, memory, 0, 2, &key, LENGTH - 1, NULL, 0), invalid, "end of the key's memory");
    FAILS(doorbell_read(peer, memory, SIZE_MAX, SIZE_MAX, &key, 0, 0), invalid, "beyond the memory's end");
    FAILS(doorbell_write(peer, memory, 0, 1, NULL, 0, NULL, 0), invalid, "key is NULL");
    OK(doorbell_get_key(memory, &readable));
    FAILS(doorbell_write(peer, memory, 0, 1, &readable, 0, NULL, 0), invalid, "grants READ");
    FAILS(doorbell_send(NULL, memory, 0, 1, NULL, 0), invalid, "connection is NULL");
    FAILS(doorbell_send(peer, NULL, 0, 1, NULL, 0), invalid, "memory is NULL");
    FAILS(doorbell_receive(peer, 0, NULL), invalid, "message is NULL");
    for (int i = 0; i < DOORBELL_MAX_RECEIVES; i++) {
        OK(doorbell_post_receive(peer, memory, 0, 1));
    }
    FAILS(doorbell_post_receive(peer, memory, 0, 1), invalid, "128 receives");
    doorbell_comm *alone;
    doorbell_memory *of_comm;
    OK(doorbell_comm_create(device, 0, 1, "127.0.0.1:18650", "a secret of the test", TIMEOUT_MS, &alone));
    OK(doorbell_comm_alloc(alone, LENGTH, &of_comm));
    FAILS(doorbell_send(peer, of_comm, 0, 1, NULL, 0), invalid, "a communicator's");
    OK(doorbell_free(of_comm));
    OK(doorbell_comm_destroy(alone));

    memcpy(bytes, "words", 5);
    uint32_t immediate = 0xABCDEF01;
    OK(doorbell_write(peer, memory, 0, 5, &key, 1000, &immediate, TIMEOUT_MS));

    /* The peer has no receive: the connection fails, and stays so. */
    FAILS(doorbell_send(peer, memory, 0, 1, NULL, SHORT_MS), DOORBELL_TIMED_OUT, "no answer");
    FAILS(doorbell_send(peer, memory, 0, 1, NULL, TIMEOUT_MS), DOORBELL_TIMED_OUT, "failed before");
    FAILS(doorbell_receive(peer, 0, &message), DOORBELL_TIMED_OUT, "failed before");
    OK(doorbell_disconnect(peer));
    OK(doorbell_free(memory));
    OK(doorbell_close(device));
    return unused;
}

int main(void) {
    OK(doorbell_listen("127.0.0.1:0", &listener));
    snprintf(address, sizeof address, "127.0.0.1:%u", doorbell_listener_port(listener));
    pthread_t threads[2];
    EXPECT(pthread_create(&threads[0], NULL, server, NULL) == 0);
    EXPECT(pthread_create(&threads[1], NULL, client, NULL) == 0);
    EXPECT(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    OK(doorbell_listener_close(listener));
    return 0;
}
