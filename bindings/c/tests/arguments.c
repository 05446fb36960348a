/* Each wrong argument has its status and one line of text: arguments UNUSED_PORT */

#include "check.h"

#include <pthread.h>

static void *texts_are_of_threads(void *unused) {
    EXPECT(strcmp(doorbell_last_error(), "") == 0);
    return unused;
}

int main(int argc, char **argv) {
    EXPECT(argc == 2);
    const doorbell_status invalid = DOORBELL_INVALID_ARGUMENT;
    EXPECT(strcmp(doorbell_last_error(), "") == 0);
    doorbell_device *device = (doorbell_device *)&device;
    FAILS(doorbell_open("soft?drop=2", &device), invalid, "drop");
    EXPECT(device == NULL);
    FAILS(doorbell_open("soft?colour=red", &device), invalid, "colour");
    FAILS(doorbell_open("soft\xFF", &device), invalid, "name is not UTF-8");
    FAILS(doorbell_open("soft", NULL), invalid, "device is NULL");
    FAILS(doorbell_open("no_such_device", &device), DOORBELL_NO_DEVICE, "");
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, texts_are_of_threads, NULL) == 0 && pthread_join(thread, NULL) == 0);

    OK(doorbell_open("soft", &device));
    doorbell_memory *memory;
    FAILS(doorbell_alloc(NULL, 1, DOORBELL_LOCAL, &memory), invalid, "device is NULL");
    FAILS(doorbell_alloc(device, 0, DOORBELL_LOCAL, &memory), invalid, "empty");
    FAILS(doorbell_alloc(device, 1, (doorbell_access)4, &memory), invalid, "access 4 is no doorbell_access");
    FAILS(doorbell_alloc(device, (size_t)1 << 32, DOORBELL_LOCAL, &memory), invalid, "longer than a message may be");
    FAILS(doorbell_register(device, NULL, 1, DOORBELL_LOCAL, &memory), invalid, "address is NULL");
    EXPECT(memory == NULL && doorbell_address(NULL) == NULL);

    doorbell_listener *listener;
    doorbell_connection *connection;
    FAILS(doorbell_listen("192.0.2.1:1", &listener), DOORBELL_CONNECTION_FAILED, "192.0.2.1:1");
    FAILS(doorbell_listen(NULL, &listener), invalid, "address is NULL");
    OK(doorbell_listen("127.0.0.1:0", &listener));
    EXPECT(doorbell_listener_port(listener) != 0 && doorbell_listener_port(NULL) == 0);
    FAILS(doorbell_accept(listener, device, 10, &connection), DOORBELL_TIMED_OUT, "no answer");
    EXPECT(connection == NULL);
    FAILS(doorbell_accept(NULL, device, 10, &connection), invalid, "listener is NULL");
    FAILS(doorbell_connect(device, argv[1], 10, &connection), DOORBELL_CONNECTION_FAILED, "is the other end running");
    FAILS(doorbell_connect(NULL, argv[1], 10, &connection), invalid, "device is NULL");

    const char *secret = "a secret of the test";
    doorbell_comm *comm;
    FAILS(doorbell_comm_create(NULL, 0, 1, argv[1], secret, 10, &comm), invalid, "device is NULL");
    FAILS(doorbell_comm_create(device, 2, 2, argv[1], secret, 10, &comm), invalid, "rank 2 is not one of 2");
    FAILS(doorbell_comm_create(device, 0, 1, "nowhere", secret, 10, &comm), invalid, "not HOST:PORT");
    FAILS(doorbell_comm_create(device, 0, 1, argv[1], "short", 10, &comm), invalid, "at least 16 characters");
    FAILS(doorbell_comm_create(device, 0, 1, argv[1], secret, 0, &comm), invalid, "timeout_ms is 0");
    FAILS(doorbell_comm_create(device, 0, 2, argv[1], secret, 50, &comm), DOORBELL_TIMED_OUT, "rank 1");
    FAILS(doorbell_comm_create(device, 1, 2, argv[1], secret, 50, &comm), DOORBELL_TIMED_OUT, "no rendezvous");
    FAILS(doorbell_comm_create_from_env(device, 50, &comm), invalid, "DOORBELL_RANK");
    EXPECT(comm == NULL && doorbell_comm_rank(NULL) == 0 && doorbell_comm_size(NULL) == 0);

    OK(doorbell_listener_close(listener));
    OK(doorbell_close(device));
    /* Nothing has no end. */
    OK(doorbell_close(NULL));
    OK(doorbell_free(NULL));
    OK(doorbell_listener_close(NULL));
    OK(doorbell_disconnect(NULL));
    OK(doorbell_comm_destroy(NULL));
    puts(doorbell_version());
    return 0;
}
