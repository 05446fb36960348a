/* Every collective, type and reduction on two ranks: collectives RANK HOST:PORT */

#include "check.h"

#include <stdint.h>

enum { COUNT = 1000 };

static doorbell_comm *comm;
static uint32_t rank;

/* The bits of numbers in each type; the mean of 1 and 2 is 1 in integers. */
static const struct bits {
    doorbell_type type;
    size_t size;
    uint64_t one, two, three, mean;
} TYPES[] = {
    {DOORBELL_INT8, 1, 1, 2, 3, 1},
    {DOORBELL_UINT8, 1, 1, 2, 3, 1},
    {DOORBELL_INT32, 4, 1, 2, 3, 1},
    {DOORBELL_UINT32, 4, 1, 2, 3, 1},
    {DOORBELL_INT64, 8, 1, 2, 3, 1},
    {DOORBELL_UINT64, 8, 1, 2, 3, 1},
    {DOORBELL_FLOAT16, 2, 0x3C00, 0x4000, 0x4200, 0x3E00},
    {DOORBELL_FLOAT32, 4, 0x3F800000, 0x40000000, 0x40400000, 0x3FC00000},
    {DOORBELL_FLOAT64, 8, 0x3FF0000000000000, 0x4000000000000000, 0x4008000000000000, 0x3FF8000000000000},
    {DOORBELL_BFLOAT16, 2, 0x3F80, 0x4000, 0x4040, 0x3FC0},
    {DOORBELL_FLOAT8_E4M3, 1, 0x38, 0x40, 0x44, 0x3C},
    {DOORBELL_FLOAT8_E5M2, 1, 0x3C, 0x40, 0x42, 0x3E},
};

static void fill(unsigned char *data, uint64_t bits, size_t size, size_t count) {
    for (size_t i = 0; i < count; i++) {
        memcpy(data + i * size, &bits, size);
    }
}

static void expect(const unsigned char *data, uint64_t bits, size_t size, size_t count) {
    for (size_t i = 0; i < count; i++) {
        EXPECT(memcmp(data + i * size, &bits, size) == 0);
    }
}

static void reductions(const struct bits *type) {
    const struct {
        doorbell_reduction reduction;
        uint64_t result;
    } cases[] = {
        {DOORBELL_SUM, type->three}, {DOORBELL_PROD, type->two}, {DOORBELL_MAX, type->two},
        {DOORBELL_MIN, type->one},   {DOORBELL_AVG, type->mean},
    };
    /* Aligned for any type. */
    static uint64_t in[COUNT], out[COUNT];
    unsigned char *input = (unsigned char *)in, *output = (unsigned char *)out;
    uint64_t own = rank == 0 ? type->one : type->two;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        doorbell_reduction reduction = cases[i].reduction;
        uint64_t result = cases[i].result;
        fill(input, own, type->size, COUNT);
        OK(doorbell_all_reduce(comm, input, output, COUNT, type->type, reduction));
        expect(output, result, type->size, COUNT);
        expect(input, own, type->size, COUNT);
        OK(doorbell_all_reduce(comm, input, input, COUNT, type->type, reduction));
        expect(input, result, type->size, COUNT);

        fill(input, own, type->size, COUNT);
        memset(output, 0, sizeof out);
        OK(doorbell_reduce_scatter(comm, input, output, COUNT / 2, type->type, reduction));
        expect(output, result, type->size, COUNT / 2);
        expect(output + COUNT / 2 * type->size, 0, type->size, COUNT / 2);
        unsigned char *part = input + rank * (COUNT / 2) * type->size;
        OK(doorbell_reduce_scatter(comm, input, part, COUNT / 2, type->type, reduction));
        expect(part, result, type->size, COUNT / 2);
    }
}

static void copies(void) {
    uint32_t part[COUNT], all[2 * COUNT], other[2 * COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        part[i] = rank * COUNT + i;
    }
    OK(doorbell_all_gather(comm, part, all, COUNT, DOORBELL_UINT32));
    for (uint32_t i = 0; i < 2 * COUNT; i++) {
        EXPECT(all[i] == i);
        other[i] = i / COUNT == rank ? i : 0;
    }
    OK(doorbell_all_gather(comm, other + rank * COUNT, other, COUNT, DOORBELL_UINT32));
    EXPECT(memcmp(all, other, sizeof all) == 0);

    /* Element i of the part for a rank is of the sender: 10000 * sender + place. */
    for (uint32_t i = 0; i < 2 * COUNT; i++) {
        all[i] = 10000 * rank + i;
    }
    OK(doorbell_all_to_all(comm, all, other, COUNT, DOORBELL_UINT32));
    for (uint32_t i = 0; i < 2 * COUNT; i++) {
        EXPECT(other[i] == 10000 * (i / COUNT) + rank * COUNT + i % COUNT);
    }

    for (uint32_t root = 0; root < 2; root++) {
        double value[3] = {rank + 0.5, rank + 1.5, rank + 2.5};
        OK(doorbell_broadcast(comm, value, 3, DOORBELL_FLOAT64, root));
        EXPECT(value[0] == root + 0.5 && value[1] == root + 1.5 && value[2] == root + 2.5);
    }

    int64_t message = rank == 0 ? -7 : 0;
    if (rank == 0) {
        OK(doorbell_comm_send(comm, &message, 1, DOORBELL_INT64, 1));
    } else {
        OK(doorbell_comm_receive(comm, &message, 1, DOORBELL_INT64, 0));
        EXPECT(message == -7);
    }
    OK(doorbell_barrier(comm));
    /* Nothing, of nowhere. */
    OK(doorbell_all_reduce(comm, NULL, NULL, 0, DOORBELL_FLOAT32, DOORBELL_SUM));
}

/* In memory of the communicator, which it then outlives. */
static doorbell_memory *registered(void) {
    enum { PARTS = 3 };
    doorbell_memory *memory;
    OK(doorbell_comm_alloc(comm, PARTS * COUNT * sizeof(float), &memory));
    float *data = doorbell_address(memory);
    for (size_t i = 0; i < PARTS * COUNT; i++) {
        EXPECT(data[i] == 0);
        data[i] = (float)(rank + 1);
    }
    /* Parts of it, from one to another and in place. */
    float *second = data + COUNT, *third = second + COUNT;
    OK(doorbell_all_reduce(comm, data, second, COUNT, DOORBELL_FLOAT32, DOORBELL_SUM));
    OK(doorbell_reduce_scatter(comm, third, third + rank * 100, 100, DOORBELL_FLOAT32, DOORBELL_AVG));
    for (size_t i = 0; i < COUNT; i++) {
        float own = (float)(rank + 1);
        bool is_reduced = i / 100 == rank;
        EXPECT(data[i] == own && second[i] == 3);
        EXPECT(i < 200 && !is_reduced ? true : third[i] == (is_reduced ? 1.5f : own));
    }
    doorbell_key key;
    FAILS(doorbell_get_key(memory, &key), DOORBELL_INVALID_ARGUMENT, "has no key");
    return memory;
}

/* What is refused has begun nothing: the next call succeeds. */
static void refused(void) {
    const doorbell_status invalid = DOORBELL_INVALID_ARGUMENT;
    union {
        float floats[8];
        unsigned char bytes[32];
    } data = {{1, 1, 1, 1, 1, 1, 1, 1}};
    float *f = data.floats;
    FAILS(doorbell_all_reduce(NULL, f, f, 1, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "comm is NULL");
    FAILS(doorbell_all_reduce(comm, NULL, f, 1, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "input is NULL");
    FAILS(doorbell_all_reduce(comm, f, NULL, 1, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "output is NULL");
    FAILS(doorbell_all_reduce(comm, f, f, 1, (doorbell_type)99, DOORBELL_SUM), invalid, "type 99 is no doorbell_type");
    FAILS(doorbell_all_reduce(comm, f, f, 1, DOORBELL_FLOAT32, (doorbell_reduction)9), invalid, "reduction 9 is no");
    FAILS(doorbell_all_reduce(comm, f, f, SIZE_MAX, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "more than there can be");
    FAILS(doorbell_all_reduce(comm, data.bytes + 1, data.bytes + 1, 1, DOORBELL_FLOAT32, DOORBELL_SUM), invalid,
          "not aligned to 4 bytes");
    FAILS(doorbell_all_reduce(comm, f, f + 1, 2, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "overlap");
    FAILS(doorbell_reduce_scatter(comm, f, f + 1 - rank, 2, DOORBELL_FLOAT32, DOORBELL_SUM), invalid, "overlap");
    FAILS(doorbell_all_gather(comm, f + 1, f, 2, DOORBELL_FLOAT32), invalid, "overlap");
    FAILS(doorbell_all_gather(comm, f, f, SIZE_MAX / 4, DOORBELL_FLOAT32), invalid, "more than there can be");
    FAILS(doorbell_all_to_all(comm, f, f, 2, DOORBELL_FLOAT32), invalid, "overlap");
    FAILS(doorbell_broadcast(comm, f, 1, DOORBELL_FLOAT32, 2), invalid, "rank 2");
    FAILS(doorbell_comm_send(comm, f, 1, DOORBELL_FLOAT32, 2), invalid, "no rank 2");
    FAILS(doorbell_comm_receive(comm, f, 1, DOORBELL_FLOAT32, rank), invalid, "this rank itself");
    FAILS(doorbell_comm_abort(NULL, NULL), invalid, "comm is NULL");
    FAILS(doorbell_comm_failure(NULL, NULL), invalid, "comm is NULL");
    FAILS(doorbell_barrier(NULL), invalid, "comm is NULL");
    doorbell_memory *memory;
    FAILS(doorbell_comm_alloc(NULL, 1, &memory), invalid, "comm is NULL");
    FAILS(doorbell_comm_alloc(comm, SIZE_MAX, &memory), invalid, "more than there can be");
    EXPECT(memory == NULL);
    int64_t culprit = 5;
    OK(doorbell_comm_failure(comm, &culprit));
    EXPECT(culprit == 5);
    OK(doorbell_all_reduce(comm, f, f, 1, DOORBELL_FLOAT32, DOORBELL_SUM));
    EXPECT(f[0] == 2);
}

int main(int argc, char **argv) {
    EXPECT(argc == 3);
    rank = (uint32_t)atoi(argv[1]);
    doorbell_device *device;
    OK(doorbell_open("soft0", &device));
    OK(doorbell_comm_create(device, rank, 2, argv[2], "a secret of the test", 60000, &comm));
    /* It keeps its device. */
    OK(doorbell_close(device));
    EXPECT(doorbell_comm_rank(comm) == rank && doorbell_comm_size(comm) == 2);
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++) {
        reductions(&TYPES[i]);
    }
    copies();
    refused();
    doorbell_memory *memory = registered();
    OK(doorbell_comm_destroy(comm));
    *(float *)doorbell_address(memory) = 1;
    OK(doorbell_free(memory));
    return 0;
}
