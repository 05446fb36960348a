/* guilty ROW ITERATIONS: does in a measured function all that a data path must not. A control:
 * `cargo xtask instructions` must detect it. */
#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int counter;

__attribute__((noinline)) int measure_guilty(long n)
{
	int *volatile heap = malloc(sizeof *heap);
	pthread_mutex_lock(&mutex);
	*heap = __atomic_fetch_add(&counter, n, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&mutex);
	int before = __atomic_exchange_n(&counter, *heap, __ATOMIC_RELAXED);
	free(heap);
	return before;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	for (long left = atol(argv[2]); left > 0; left--)
		measure_guilty(left);
	return 0;
}
