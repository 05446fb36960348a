/* Every byte of each message is checked; prints how many, and the bandwidth and latency between two ranks. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char expected(long at, int from, int round)
{
	return (unsigned char)(at * 7 + from * 31 + round);
}

/* Rank 0 sends and rank 1 returns; the bytes of a message depend on the sender and the round. */
static double pingpong(int rank, unsigned char *buffer, int bytes, int rounds, long long *verified)
{
	double start = MPI_Wtime();

	for (int round = 0; round < rounds; round++) {
		for (int from = 0; from < 2; from++) {
			if (rank == from) {
				for (int at = 0; at < bytes; at++)
					buffer[at] = expected(at, from, round);
				MPI_Send(buffer, bytes, MPI_BYTE, !rank, round, MPI_COMM_WORLD);
				continue;
			}
			MPI_Recv(buffer, bytes, MPI_BYTE, from, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			for (int at = 0; at < bytes; at++)
				if (buffer[at] != expected(at, from, round)) {
					fprintf(stderr, "byte %d of round %d is wrong\n", at, round);
					MPI_Abort(MPI_COMM_WORLD, 1);
				}
			*verified += bytes;
		}
	}
	return MPI_Wtime() - start;
}

int main(int argc, char **argv)
{
	static unsigned char buffer[1 << 20];
	long long verified = 0, total, sum = 0, mine;
	int rank, size;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	double small = pingpong(rank, buffer, 8, 1000, &verified);
	double large = pingpong(rank, buffer, sizeof(buffer), 50, &verified);
	MPI_Allreduce(&verified, &total, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
	mine = rank + 1;
	MPI_Allreduce(&mine, &sum, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
	if (rank == 0 && sum == (long long)size * (size + 1) / 2)
		printf("verified %lld bytes, %.3f us, %.3f GB/s\n", total, small / 2000 * 1e6, 100.0 * sizeof(buffer) / large / 1e9);
	MPI_Finalize();
	return 0;
}
