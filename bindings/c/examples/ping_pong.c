/*
 * Messages to and fro, and the mean time of one:
 *
 *     ping_pong 127.0.0.1:18601 & ping_pong 127.0.0.1:18601 client
 */

#include <doorbell.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 1000, LENGTH = 64, TIMEOUT_MS = 10000 };

static void check(doorbell_status status) {
    if (status != DOORBELL_OK) {
        fprintf(stderr, "ping_pong: %s\n", doorbell_last_error());
        exit(1);
    }
}

/* Waits for a message, and gives its memory back for the next. */
static uint32_t receive(doorbell_connection *peer, doorbell_memory *memory, char *text) {
    doorbell_message message;
    check(doorbell_receive(peer, TIMEOUT_MS, &message));
    memcpy(text, message.data, message.length);
    check(doorbell_post_receive(peer, memory, 0, LENGTH));
    return message.immediate;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: ping_pong HOST:PORT [client]\n");
        return 2;
    }
    int client = argc > 2;
    doorbell_device *device;
    doorbell_memory *memory;
    doorbell_connection *peer;
    check(doorbell_open(NULL, &device));
    /* One half to receive into, one to send from. */
    check(doorbell_alloc(device, 2 * LENGTH, DOORBELL_LOCAL, &memory));
    char *out = (char *)doorbell_address(memory) + LENGTH, in[LENGTH];
    if (client) {
        check(doorbell_connect(device, argv[1], TIMEOUT_MS, &peer));
    } else {
        doorbell_listener *listener;
        check(doorbell_listen(argv[1], &listener));
        check(doorbell_accept(listener, device, TIMEOUT_MS, &peer));
        check(doorbell_listener_close(listener));
    }
    check(doorbell_post_receive(peer, memory, 0, LENGTH));

    struct timespec start, end;
    timespec_get(&start, TIME_UTC);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        /* The client's message has the number of the round, which comes back. */
        uint32_t number = client ? round : receive(peer, memory, in);
        snprintf(out, LENGTH, "message %u", number);
        check(doorbell_send(peer, memory, LENGTH, LENGTH, &number, TIMEOUT_MS));
        if (client && (receive(peer, memory, in) != round || strcmp(in, out) != 0)) {
            fprintf(stderr, "ping_pong: message %u has come back as \"%s\"\n", round, in);
            return 1;
        }
    }
    timespec_get(&end, TIME_UTC);
    double us = (double)(end.tv_sec - start.tv_sec) * 1e6 + (double)(end.tv_nsec - start.tv_nsec) / 1e3;
    if (client) {
        printf("%d messages to and fro, %.1f us each\n", ROUNDS, us / (2 * ROUNDS));
    }
    check(doorbell_disconnect(peer));
    check(doorbell_free(memory));
    return doorbell_close(device);
}
