/*
 * Doorbell: RDMA connections, userspace RoCEv2 devices and collectives, for what libibverbs' own
 * functions cannot say. Made of the sources by cbindgen: change those. The book's chapter "From C"
 * has whole programs.
 *
 * Status. A function that can fail returns a doorbell_status, DOORBELL_OK being 0, and then
 * doorbell_last_error() says in one line what was wrong. A NULL where an object is expected is
 * DOORBELL_INVALID_ARGUMENT. Nothing aborts, raises signals or calls back.
 *
 * Objects. A function that makes one stores a handle, or NULL when it fails, in its last argument;
 * the caller ends each handle once, by the function that its type names, and uses it no more. The
 * order does not matter: what an object is made of exists until the object is ended. Ending NULL
 * does nothing.
 *
 * Memory. Arguments are borrowed for the call, unless a function says otherwise. Lengths and
 * offsets are in bytes, counts in elements.
 *
 * Time. A timeout_ms is in milliseconds; DOORBELL_FOREVER does not pass.
 *
 * Threads. All functions may be called by any thread. Calls with one connection run one after the
 * other, and so do operations of one communicator; other handles are read only. No handle may be
 * in use when it is ended. A child made by fork(2) must not use its parent's objects.
 *
 * Signals. The userspace device has a handler of SIGSEGV and SIGBUS for its own accesses to
 * registered memory, which passes all others on. Its threads block all signals.
 */

#ifndef DOORBELL_H
#define DOORBELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * A timeout_ms that does not pass.
 */
#define DOORBELL_FOREVER UINT32_MAX

/**
 * The receives that may be posted on a connection.
 */
#define DOORBELL_MAX_RECEIVES 128

/**
 * What a call came to.
 */
typedef enum {
    /**
     * It has done what it should.
     */
    DOORBELL_OK = 0,
    /**
     * An argument, or a variable of the environment, is invalid; nothing was begun.
     */
    DOORBELL_INVALID_ARGUMENT = 1,
    /**
     * There is no such device, or it cannot be opened.
     */
    DOORBELL_NO_DEVICE = 2,
    /**
     * Memory cannot be allocated or registered.
     */
    DOORBELL_NO_MEMORY = 3,
    /**
     * No connection could be made: nothing listens there, it is another program, or the secrets
     * of the ranks differ.
     */
    DOORBELL_CONNECTION_FAILED = 4,
    /**
     * The time has passed.
     */
    DOORBELL_TIMED_OUT = 5,
    /**
     * A peer has left, died, stopped or cannot be reached any more.
     */
    DOORBELL_PEER_FAILED = 6,
    /**
     * A rank has aborted the communicator.
     */
    DOORBELL_ABORTED = 7,
    /**
     * The ranks of a communicator have begun different operations, or with different lengths.
     */
    DOORBELL_MISMATCH = 8,
    /**
     * The device, or the peer's, has refused a request or failed to execute it.
     */
    DOORBELL_DEVICE_ERROR = 9,
    /**
     * A defect of the library.
     */
    DOORBELL_INTERNAL_ERROR = 10,
} doorbell_status;

/**
 * What peers that have the key of memory may do with it. The values are bits.
 */
typedef enum {
    /**
     * Nothing: it is for sending and receiving.
     */
    DOORBELL_LOCAL = 0,
    /**
     * Read it.
     */
    DOORBELL_PEER_READ = 1,
    /**
     * Write it.
     */
    DOORBELL_PEER_WRITE = 2,
    /**
     * Both.
     */
    DOORBELL_PEER_READ_WRITE = 3,
} doorbell_access;

/**
 * The type of an element. The values are NCCL's.
 */
typedef enum {
    /**
     * Signed, 8 bits.
     */
    DOORBELL_INT8 = 0,
    /**
     * Unsigned, 8 bits.
     */
    DOORBELL_UINT8 = 1,
    /**
     * Signed, 32 bits.
     */
    DOORBELL_INT32 = 2,
    /**
     * Unsigned, 32 bits.
     */
    DOORBELL_UINT32 = 3,
    /**
     * Signed, 64 bits.
     */
    DOORBELL_INT64 = 4,
    /**
     * Unsigned, 64 bits.
     */
    DOORBELL_UINT64 = 5,
    /**
     * IEEE 754 binary16.
     */
    DOORBELL_FLOAT16 = 6,
    /**
     * IEEE 754 binary32, float.
     */
    DOORBELL_FLOAT32 = 7,
    /**
     * IEEE 754 binary64, double.
     */
    DOORBELL_FLOAT64 = 8,
    /**
     * bfloat16: the upper half of a binary32.
     */
    DOORBELL_BFLOAT16 = 9,
    /**
     * 8 bits: sign, 4 of exponent, 3 of mantissa (OCP FP8, E4M3).
     */
    DOORBELL_FLOAT8_E4M3 = 10,
    /**
     * 8 bits: sign, 5 of exponent, 2 of mantissa (OCP FP8, E5M2).
     */
    DOORBELL_FLOAT8_E5M2 = 11,
} doorbell_type;

/**
 * A reduction. The values are NCCL's. Floats of 16 and 8 bits are reduced as float, and rounded
 * once.
 */
typedef enum {
    /**
     * The sum; integers wrap.
     */
    DOORBELL_SUM = 0,
    /**
     * The product; integers wrap.
     */
    DOORBELL_PROD = 1,
    /**
     * The maximum.
     */
    DOORBELL_MAX = 2,
    /**
     * The minimum.
     */
    DOORBELL_MIN = 3,
    /**
     * The sum, divided by the number of ranks; integers truncate towards zero.
     */
    DOORBELL_AVG = 4,
} doorbell_reduction;

/**
 * One rank of a communicator. Ended by doorbell_comm_destroy().
 *
 * All ranks call the same collectives in the same order, with the same counts, types, reductions
 * and roots. Each call returns when it is complete on this rank: its output is valid, and its
 * input may be changed. A call of which an argument is invalid has begun nothing. Any other error
 * is a failure of the communicator, on all ranks and for all later calls, within the time-out it
 * was made with; doorbell_comm_failure() names the rank to blame, the same on all ranks.
 */
typedef struct doorbell_comm doorbell_comm;

/**
 * A connection to one peer: a reliable connected (RC) queue pair. Ended by doorbell_disconnect().
 */
typedef struct doorbell_connection doorbell_connection;

/**
 * An open device. Ended by doorbell_close().
 */
typedef struct doorbell_device doorbell_device;

/**
 * What listens for connections. Ended by doorbell_listener_close().
 */
typedef struct doorbell_listener doorbell_listener;

/**
 * Registered memory, for connections of its device, or for operations of its communicator. Ended
 * by doorbell_free().
 */
typedef struct doorbell_memory doorbell_memory;

/**
 * A key to memory, by which peers read and write it. It is the same bytes on every host: send it
 * as it is. Who has it may use it as long as the memory is registered.
 */
typedef struct {
    /**
     * Its bytes.
     */
    uint8_t bytes[24];
} doorbell_key;

/**
 * A message that has arrived.
 */
typedef struct {
    /**
     * Its first byte, in the receive posted first of those that were left: that one is the
     * caller's again.
     */
    void *data;
    /**
     * Its length in bytes; of a peer's write with immediate data what it has written.
     */
    size_t length;
    /**
     * Its immediate data, if it has any.
     */
    uint32_t immediate;
    /**
     * Whether it has immediate data.
     */
    bool has_immediate;
    /**
     * Whether it is a peer's write with immediate data: the bytes at data are as they were.
     */
    bool is_write;
} doorbell_message;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the library, such as "0.1.0". Valid for ever.
 */
const char *doorbell_version(void);

/**
 * What was wrong in the last call of this thread that has failed, in one line of UTF-8; "" if none
 * has. Valid until the next one that fails in this thread.
 */
const char *doorbell_last_error(void);

/**
 * Opens a device by its name:
 *
 * - "soft0": the userspace RoCEv2 device, with the address of DOORBELL_SOFT_ADDR or 127.0.0.1;
 * - "soft", or with options as in "soft?drop=0.01&seed=7": a userspace device of its own;
 * - "mlx5_0" and all others: a device of the system's libibverbs;
 * - NULL: what the variable DOORBELL_DEVICE names, or else "soft0".
 *
 * DOORBELL_NO_DEVICE if there is none or it cannot be opened, DOORBELL_INVALID_ARGUMENT if it does
 * not have such an option.
 */
doorbell_status doorbell_open(const char *name, doorbell_device **device);

/**
 * Ends the handle of a device, which is closed when the last object that uses it is ended.
 */
doorbell_status doorbell_close(doorbell_device *device);

/**
 * Allocates and registers memory of this length, initially zero. Between processes of one host it
 * is the fastest for the userspace device.
 *
 * DOORBELL_NO_MEMORY if there is none, or the limit of locked memory (ulimit -l) is reached.
 */
doorbell_status doorbell_alloc(const doorbell_device *device,
                               size_t length,
                               doorbell_access access,
                               doorbell_memory **memory);

/**
 * Registers the caller's memory, which has to exist until the handle is ended and all connections
 * that receives in it were posted on.
 *
 * DOORBELL_NO_MEMORY if an adapter finds no memory there that can be written, or the limit of
 * locked memory (ulimit -l) is reached; the userspace device finds out when it uses it.
 */
doorbell_status doorbell_register(const doorbell_device *device,
                                  void *address,
                                  size_t length,
                                  doorbell_access access,
                                  doorbell_memory **memory);

/**
 * The first byte of memory; NULL of NULL. The caller may use the bytes whenever no call, posted
 * receive or peer uses the same.
 */
void *doorbell_address(const doorbell_memory *memory);

/**
 * Stores the key of memory, for peers. DOORBELL_INVALID_ARGUMENT if it is DOORBELL_LOCAL or a
 * communicator's.
 */
doorbell_status doorbell_get_key(const doorbell_memory *memory, doorbell_key *key);

/**
 * Ends the handle of memory. It is deregistered, and freed if doorbell_alloc() or
 * doorbell_comm_alloc() has allocated it, when no receive is posted in it any more.
 */
doorbell_status doorbell_free(doorbell_memory *memory);

/**
 * Listens on an address, "HOST:PORT" as "0.0.0.0:18516" or "[::1]:18516"; port 0 is any free one.
 * Hosts are not authenticated: listen only on trusted networks.
 *
 * DOORBELL_CONNECTION_FAILED if the address is not of this host, or in use.
 */
doorbell_status doorbell_listen(const char *address, doorbell_listener **listener);

/**
 * The TCP port that it listens on; 0 of NULL.
 */
uint16_t doorbell_listener_port(const doorbell_listener *listener);

/**
 * Waits for a peer and connects to it, for so long each; several threads may.
 *
 * DOORBELL_TIMED_OUT if none comes in time.
 */
doorbell_status doorbell_accept(const doorbell_listener *listener,
                                const doorbell_device *device,
                                uint32_t timeout_ms,
                                doorbell_connection **connection);

/**
 * Ends the handle of what listens. Its connections stay.
 */
doorbell_status doorbell_listener_close(doorbell_listener *listener);

/**
 * Connects to a peer that listens on "HOST:PORT", or will in this time.
 *
 * DOORBELL_CONNECTION_FAILED if none does.
 */
doorbell_status doorbell_connect(const doorbell_device *device,
                                 const char *address,
                                 uint32_t timeout_ms,
                                 doorbell_connection **connection);

/**
 * Posts a receive: the length bytes at offset of the memory are the connection's, for one message
 * of at most that length, until doorbell_receive() returns it or the connection is ended. Messages
 * take receives in the order in which they were posted; a peer that sends before one is posted
 * waits. Returns at once.
 *
 * DOORBELL_INVALID_ARGUMENT also if DOORBELL_MAX_RECEIVES are posted or not taken yet.
 */
doorbell_status doorbell_post_receive(doorbell_connection *connection,
                                      const doorbell_memory *memory,
                                      size_t offset,
                                      size_t length);

/**
 * Waits for the next message. It stays in the memory of its receive.
 *
 * DOORBELL_TIMED_OUT if none arrives in time, after which the connection can be used as before;
 * DOORBELL_PEER_FAILED if the peer has disconnected, and all its messages have been taken.
 */
doorbell_status doorbell_receive(doorbell_connection *connection,
                                 uint32_t timeout_ms,
                                 doorbell_message *message);

/**
 * Sends the length bytes at offset of the memory as one message, with 32 bits of immediate data
 * unless that is NULL, and waits until the peer has received it.
 *
 * If it fails or times out after it was begun, the connection has failed: it does not use memory
 * any more, later calls return the same status, and it can only be ended.
 */
doorbell_status doorbell_send(doorbell_connection *connection,
                              const doorbell_memory *memory,
                              size_t offset,
                              size_t length,
                              const uint32_t *immediate,
                              uint32_t timeout_ms);

/**
 * Writes the length bytes at offset of the memory to the peer's memory that the key is of, at
 * offset_there, and waits until the peer's device has them. With immediate data, unless that is
 * NULL, a receive of the peer returns, as doorbell_message describes; without it the peer is not
 * notified.
 *
 * DOORBELL_INVALID_ARGUMENT if the key grants no writing, or the bytes are beyond its memory;
 * DOORBELL_DEVICE_ERROR if the peer's device does not accept the key. For the rest it is as
 * doorbell_send().
 */
doorbell_status doorbell_write(doorbell_connection *connection,
                               const doorbell_memory *memory,
                               size_t offset,
                               size_t length,
                               const doorbell_key *key,
                               uint64_t offset_there,
                               const uint32_t *immediate,
                               uint32_t timeout_ms);

/**
 * Reads length bytes of the peer's memory that the key is of, from offset_there on, to the memory
 * at offset. The peer is not notified.
 *
 * DOORBELL_INVALID_ARGUMENT if the key grants no reading, or the bytes are beyond its memory; for
 * the rest it is as doorbell_write().
 */
doorbell_status doorbell_read(doorbell_connection *connection,
                              const doorbell_memory *memory,
                              size_t offset,
                              size_t length,
                              const doorbell_key *key,
                              uint64_t offset_there,
                              uint32_t timeout_ms);

/**
 * Ends the handle of a connection. Waits until the peer disconnects, too, so that what was sent
 * last is acknowledged, for the time that doorbell_accept() or doorbell_connect() had. After it no
 * device uses the memory of posted receives.
 *
 * DOORBELL_PEER_FAILED or DOORBELL_TIMED_OUT if the peer does not; the handle is ended all the
 * same.
 */
doorbell_status doorbell_disconnect(doorbell_connection *connection);

/**
 * Makes a rank of a communicator on a device. All ranks call it, each with its rank, from 0 to
 * ranks - 1.
 *
 * They meet at rank 0's address, "HOST:PORT", which rank 0 listens on; where the port is taken, on
 * one of the seven after it. secret is a text of at least 16 characters that only they have, or
 * NULL for that of the variable DOORBELL_SECRET or of the file that DOORBELL_SECRET_FILE names, or
 * else that of ~/.config/doorbell/secret, which is made where there is none. timeout_ms is for the
 * ranks to meet, and then for each operation.
 *
 * DOORBELL_TIMED_OUT if some rank does not come in time, which rank 0's text names;
 * DOORBELL_CONNECTION_FAILED if rank 0 has refused this one: its time has passed before, or the
 * secrets differ.
 */
doorbell_status doorbell_comm_create(const doorbell_device *device,
                                     uint32_t rank,
                                     uint32_t ranks,
                                     const char *address,
                                     const char *secret,
                                     uint32_t timeout_ms,
                                     doorbell_comm **comm);

/**
 * As doorbell_comm_create(), with the rank, the ranks and the address that mpirun, srun or
 * torchrun has set in the environment, or that DOORBELL_RANK, DOORBELL_RANKS and DOORBELL_ID are.
 */
doorbell_status doorbell_comm_create_from_env(const doorbell_device *device,
                                              uint32_t timeout_ms,
                                              doorbell_comm **comm);

/**
 * The rank of this end; 0 of NULL.
 */
uint32_t doorbell_comm_rank(const doorbell_comm *comm);

/**
 * The number of ranks; 0 of NULL.
 */
uint32_t doorbell_comm_size(const doorbell_comm *comm);

/**
 * Allocates and registers memory of this length for operations of the communicator, initially zero
 * and aligned for every type. Operations whose input and output are in it, anywhere, copy nothing;
 * others copy through memory of the communicator. It is no connection's, and may be used after the
 * communicator has ended.
 *
 * DOORBELL_NO_MEMORY if there is none, or the limit of locked memory (ulimit -l) is reached.
 */
doorbell_status doorbell_comm_alloc(const doorbell_comm *comm,
                                    size_t length,
                                    doorbell_memory **memory);

/**
 * Whether and why the communicator has failed: DOORBELL_OK if it has not. Otherwise the status and
 * doorbell_last_error() are those of the failure, and rank, unless it is NULL, is the rank to
 * blame, or -1 where that is not known.
 */
doorbell_status doorbell_comm_failure(const doorbell_comm *comm, int64_t *rank);

/**
 * Fails the communicator on all ranks, with this reason, which may be NULL. Returns at once; may
 * be called while another thread waits in an operation of it.
 */
doorbell_status doorbell_comm_abort(const doorbell_comm *comm, const char *reason);

/**
 * Ends the handle of a communicator: completes what is in flight, and returns when all ranks have
 * called it.
 *
 * The failure of the communicator, or DOORBELL_TIMED_OUT if a rank does not call it in time; the
 * handle is ended all the same.
 */
doorbell_status doorbell_comm_destroy(doorbell_comm *comm);

/**
 * Returns when all ranks have called it.
 */
doorbell_status doorbell_barrier(const doorbell_comm *comm);

/**
 * Each rank gets the reduction of all ranks' input: count elements. In place if output is input;
 * otherwise they must not overlap.
 */
doorbell_status doorbell_all_reduce(const doorbell_comm *comm,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    doorbell_type type,
                                    doorbell_reduction reduction);

/**
 * Each rank gets its part of the reduction of all ranks' input, which has count elements for each
 * rank, by rank; output has count. In place if output is the own part of input; otherwise they
 * must not overlap.
 */
doorbell_status doorbell_reduce_scatter(const doorbell_comm *comm,
                                        const void *input,
                                        void *output,
                                        size_t count,
                                        doorbell_type type,
                                        doorbell_reduction reduction);

/**
 * Each rank gets all ranks' input of count elements each, by rank. In place if input is the own
 * part of output; otherwise they must not overlap.
 */
doorbell_status doorbell_all_gather(const doorbell_comm *comm,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    doorbell_type type);

/**
 * All ranks get the root's count elements at data.
 */
doorbell_status doorbell_broadcast(const doorbell_comm *comm,
                                   void *data,
                                   size_t count,
                                   doorbell_type type,
                                   uint32_t root);

/**
 * Each rank gets its part of each rank's input: input and output have count elements for each
 * rank, by rank, and must not overlap.
 */
doorbell_status doorbell_all_to_all(const doorbell_comm *comm,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    doorbell_type type);

/**
 * Sends count elements at data to rank to, which calls doorbell_comm_receive() for as many. Only
 * these two call. Returns when they have arrived; so two ranks that both send first wait for each
 * other until they time out.
 */
doorbell_status doorbell_comm_send(const doorbell_comm *comm,
                                   const void *data,
                                   size_t count,
                                   doorbell_type type,
                                   uint32_t to);

/**
 * Receives the count elements that rank from sends to this one.
 */
doorbell_status doorbell_comm_receive(const doorbell_comm *comm,
                                      void *data,
                                      size_t count,
                                      doorbell_type type,
                                      uint32_t from);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DOORBELL_H */
