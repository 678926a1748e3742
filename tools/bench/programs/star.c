/* The StaR paper's two workloads over many RC connections: a client's call is three SENDs of 32 B, and the
 * server answers each with one of 32 B; or, with -b, once the calls of all connections have come (a barrier,
 * as in synchronous training). Two processes, a server and one that is all clients; both poll without a
 * break. A connection has one call under way at most, and of all connections -w have one, the longest idle
 * next. With -b the client's unfinished SENDs are bounded by -w, and so are the server's.
 * Build: cc -O2 -o star star.c -libverbs
 * usage: star [-b] [-n CONNECTIONS] [-w UNDER_WAY] [-t SECONDS] [-s NAME=VALUE]
 * [-c NAME=VALUE] [-e NAME=VALUE]
 * -s and -c set the environment of the server or the client alone. Prints lines of a name and a number:
 * calls a second; the median and the 99th percentile of a call's time from its first post to its answer
 * (us); the CPU time of a message, of which a call has four, at the server and at the client (us); the
 * seconds to create and connect; what the server's process grew by for a connection with all its queues
 * (bytes); what its card keeps of a connection, and what the library keeps because the card does not; how
 * many of its connections are stateless; and how often a context was not there, by calls. */
#define _GNU_SOURCE
#include "side.h"
#include <dlfcn.h>

enum { BYTES = 32, UP = 3, BATCH = 32 };

struct connection {
	struct ibv_qp *qp;
	uint32_t number;
	/* At the server: of the call that is under way, the SENDs that came */
	uint32_t came;
	double began;
};

/* struct stardv_qp_attr of infiniband/stardv.h, its group STARDV_QP_STAR, and
 * of its roles the stateless one. */
struct star_attr {
	uint64_t comp_mask;
	uint32_t preference, role;
	uint64_t card_bytes, library_bytes;
};
enum { GROUP_STAR = 1, ROLE_STATELESS = 2 };

/* struct stardv_counters of infiniband/stardv.h up to its group
 * STARDV_COUNTERS_QPC, which is filled as a whole. */
struct counters {
	uint64_t comp_mask, card[10], hits, misses, more[9];
};
enum { GROUP_QPC = 2 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct connection *connections, **idle;
static uint32_t count = 1, under_way = 256;
static int barrier;
static char (*buffer)[BYTES];

/* Resident memory, bytes. */
static double resident(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long pages = 0;

	if (!file || fscanf(file, "%*d %ld", &pages) != 1)
		die("/proc/self/statm");
	fclose(file);
	return (double)pages * sysconf(_SC_PAGESIZE);
}

/* Receives of a connection land in `each` slots of its own. */
static void open_card(uint32_t each)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	size_t room = (size_t)count * each;

	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)))
		die("no device");
	buffer = aligned_alloc(4096, (room * BYTES + 4095) & ~(size_t)4095);
	connections = calloc(count, sizeof(*connections));
	idle = calloc(count, sizeof(*idle));
	if (!buffer || !connections || !idle)
		die("memory");
	memset(buffer, 0, room * BYTES);
	mr = ibv_reg_mr(pd, buffer, room * BYTES, IBV_ACCESS_LOCAL_WRITE);
	cq = ibv_create_cq(ctx, count * (UP + 2) + 16, NULL, NULL, 0);
	if (!mr || !cq)
		die("no memory region, or no completion queue");
}

static void receive(struct connection *c, uint32_t slots)
{
	struct ibv_sge sge[UP];
	struct ibv_recv_wr wr[UP], *bad;

	for (uint32_t i = 0; i < slots; i++) {
		sge[i] = (struct ibv_sge){ (uintptr_t)buffer[(size_t)c->number * slots + i], BYTES, mr->lkey };
		wr[i] = (struct ibv_recv_wr){ (uintptr_t)c, i + 1 < slots ? &wr[i + 1] : NULL, &sge[i], 1 };
	}
	if ((errno = ibv_post_recv(c->qp, wr, &bad)))
		die("ibv_post_recv");
}

/* Sends `messages`, of which the last gives a completion. */
static void send_to(struct connection *c, uint32_t messages)
{
	static char data[BYTES];
	struct ibv_sge sge = { (uintptr_t)data, BYTES, 0 };
	struct ibv_send_wr wr[UP], *bad;

	for (uint32_t i = 0; i < messages; i++)
		wr[i] = (struct ibv_send_wr){ .wr_id = (uintptr_t)c, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					      .next = i + 1 < messages ? &wr[i + 1] : NULL,
					      .send_flags = IBV_SEND_INLINE | (i + 1 < messages ? 0 : IBV_SEND_SIGNALED) };
	if ((errno = ibv_post_send(c->qp, wr, &bad)))
		die("ibv_post_send");
}

/* All connections, each to the other side's; receives wait at both ends when this returns. */
static void set_up(int fd, int first, uint32_t sends, uint32_t receives)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 2 * sends, 2 * receives, 1, 1, BYTES } };
	uint32_t *mine = calloc(count, sizeof(*mine)), *theirs = calloc(count, sizeof(*theirs));
	union ibv_gid gid, peer;

	if (!mine || !theirs || ibv_query_gid(ctx, 1, 0, &gid))
		die("no GID");
	for (uint32_t i = 0; i < count; i++) {
		connections[i].number = i;
		idle[i] = &connections[i];
		if (!(connections[i].qp = ibv_create_qp(pd, &init)))
			die("ibv_create_qp");
		mine[i] = connections[i].qp->qp_num;
	}
	exchange(fd, first, &gid, &peer, sizeof(gid));
	exchange(fd, first, mine, theirs, count * sizeof(*mine));
	for (uint32_t i = 0; i < count; i++) {
		connect_to(connections[i].qp, theirs[i], &peer);
		receive(&connections[i], receives);
	}
	exchange(fd, first, &gid, &peer, 1);
	free(mine);
	free(theirs);
}

/* Completions, all of success. */
static int polled(struct ibv_wc *wc)
{
	int got = ibv_poll_cq(cq, BATCH, wc);

	for (int i = 0; i < got; i++)
		if (wc[i].status != IBV_WC_SUCCESS) {
			fprintf(stderr, "star: %s\n", ibv_wc_status_str(wc[i].status));
			exit(1);
		}
	if (got < 0)
		die("ibv_poll_cq");
	return got;
}

/* Requests for a context that was not there, since the card was opened. */
static uint64_t misses(void)
{
	int (*query)(struct ibv_context *, struct counters *, uint32_t) =
		dlvsym(RTLD_DEFAULT, "stardv_query_counters", "STARDV_1.0");
	struct counters counters = { .comp_mask = GROUP_QPC };

	if (!query || (errno = query(ctx, &counters, sizeof(counters))))
		die("stardv_query_counters");
	return counters.misses;
}

/* What the server's connections are. */
static void print_roles(void)
{
	int (*query)(struct ibv_qp *, struct star_attr *, uint32_t) = dlvsym(RTLD_DEFAULT, "stardv_query_qp",
		"STARDV_1.0");
	uint64_t card = 0, library = 0;
	uint32_t stateless = 0;

	if (!query)
		die("stardv_query_qp");
	for (uint32_t i = 0; i < count; i++) {
		struct star_attr attr = { .comp_mask = GROUP_STAR };

		if ((errno = query(connections[i].qp, &attr, sizeof(attr))))
			die("stardv_query_qp");
		card += attr.card_bytes;
		library += attr.library_bytes;
		stateless += attr.role == ROLE_STATELESS;
	}
	printf("card_bytes %.1f\nlibrary_bytes %.1f\nstateless %u\n", (double)card / count, (double)library / count,
		stateless);
	fflush(stdout);
}

/* Settings of the two cards, NULL at the end. */
enum { MOST_SETTINGS = 8 };
static char *server_sets[MOST_SETTINGS + 1], *client_sets[MOST_SETTINGS + 1];

static void set_all(char **settings)
{
	while (*settings)
		putenv(*settings++);
}

/* Answers until the client says that it is done. */
static int serve(int fd)
{
	struct ibv_wc wc[BATCH];
	uint32_t ready = 0, sending = 0, answered = 0;
	uint64_t calls = 0, missed;
	double before;
	char done;

	set_all(server_sets);
	open_card(UP);
	before = resident();
	set_up(fd, 0, 1, UP);
	before = (resident() - before) / count;
	missed = misses();
	for (uint32_t polls = 1;; polls++) {
		int got = polled(wc);

		for (int i = 0; i < got; i++) {
			struct connection *c = (void *)(uintptr_t)wc[i].wr_id;

			if (wc[i].opcode != IBV_WC_RECV) {
				sending--;
			} else if (++c->came == UP) {
				c->came = 0;
				calls++;
				receive(c, UP);
				idle[ready++] = c;
			}
		}
		/* without a barrier all that wait are answered, with one when they are all */
		if (!barrier || ready == count)
			for (; answered < ready && (!barrier || sending < under_way); sending++)
				send_to(idle[answered++], 1);
		if (answered == ready && (!barrier || ready == count))
			answered = ready = 0;
		if (polls % 4096 == 0 && recv(fd, &done, 1, MSG_DONTWAIT) >= 0)
			break;
	}
	printf("server_bytes %.0f\nmisses %.3f\n", before, (double)(misses() - missed) / (calls ? calls : 1));
	print_roles();
	return 0;
}

static uint64_t drive(uint64_t calls, double seconds)
{
	struct ibv_wc wc[BATCH];
	uint64_t begun = 0, done = 0, next = 0, back = 0;
	uint32_t sending = 0, limit = barrier || under_way > count ? count : under_way;
	double end = now() + seconds;

	while (done < calls) {
		/* with a barrier a new round begins when the last one has ended */
		uint64_t bound = barrier ? done - done % count + count : done + limit;

		for (; begun < bound && begun < calls && (!barrier || sending < under_way); begun++, sending++) {
			struct connection *c = idle[next++ % count];

			c->began = now();
			send_to(c, UP);
		}
		int got = polled(wc);
		double came = got > 0 ? now() : 0;
		for (int i = 0; i < got; i++) {
			struct connection *c = (void *)(uintptr_t)wc[i].wr_id;

			if (wc[i].opcode != IBV_WC_RECV) {
				sending--;
				continue;
			}
			keep(came - c->began);
			receive(c, 1);
			idle[back++ % count] = c;
			done++;
		}
		if (got > 0 && came > end && calls == UINT64_MAX)
			calls = barrier ? begun - begun % count + (begun % count ? count : 0) : begun;
	}
	while (sending)
		sending -= polled(wc);
	return done;
}

static void work(int fd, pid_t server, double seconds)
{
	double start = now(), connected, wall, cpu[2];
	clockid_t clock;
	uint64_t done;

	open_card(1);
	set_up(fd, 1, UP, 1);
	connected = now() - start;
	if ((errno = clock_getcpuclockid(server, &clock)))
		die("the server's clock");
	shuffle(idle, count);
	/* every connection once, and all that warms up with time */
	drive(count, 60);
	drive(UINT64_MAX, seconds / 4);
	took = calloc(SAMPLES, sizeof(*took));
	start = now();
	cpu[0] = at(clock);
	cpu[1] = at(CLOCK_PROCESS_CPUTIME_ID);
	done = drive(UINT64_MAX, seconds);
	wall = now() - start;
	cpu[0] = at(clock) - cpu[0];
	cpu[1] = at(CLOCK_PROCESS_CPUTIME_ID) - cpu[1];
	printf("calls_per_second %.1f\nmedian_us %.3f\np99_us %.3f\n", done / wall, percentile(0.5),
		percentile(0.99));
	printf("server_cpu_us %.4f\nclient_cpu_us %.4f\n", cpu[0] * 1e6 / done / (UP + 1),
		cpu[1] * 1e6 / done / (UP + 1));
	printf("setup_seconds %.3f\n", connected);
	put(fd, "", 1);
}

int main(int argc, char **argv)
{
	int fd, option, server_settings = 0, client_settings = 0;
	double seconds = 1;
	pid_t server;

	while ((option = getopt(argc, argv, "bn:w:t:s:c:")) != -1) {
		if (option == 'b')
			barrier = 1;
		else if (option == 'n')
			count = strtoul(optarg, NULL, 0);
		else if (option == 'w')
			under_way = strtoul(optarg, NULL, 0);
		else if (option == 't')
			seconds = strtod(optarg, NULL);
		else if (option == 's' && server_settings < MOST_SETTINGS)
			server_sets[server_settings++] = optarg;
		else if (option == 'c' && client_settings < MOST_SETTINGS)
			client_sets[client_settings++] = optarg;
		else
			return 2;
	}
	if (!count || !under_way)
		return 2;
	server = start_server(serve, &fd);
	set_all(client_sets);
	work(fd, server, seconds);
	end_with(server);
}
