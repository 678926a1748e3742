/* The StaR paper's two workloads over many RC connections: a client's call is three SENDs of 32 B, and the
 * server answers each with one of 32 B; or, with -b, once the calls of all connections have come (a barrier,
 * as in synchronous training). Two processes, a server and one that is all clients, on a CPU each; both poll
 * without a break. A connection has one call under way at most, and of all connections -w have one, the
 * longest idle next. With -b the client's unfinished SENDs are bounded by -w, and so are the server's. -u
 * sets the SENDs of a call, -m the bytes of a message: up to 64 it is inline.
 * With -o, a stream instead: the client's SENDs, WRITEs or READs over all connections in turn, -w of them
 * under way in all. To the server's program WRITEs and READs do not show.
 * Build: cc -O2 -o star star.c -libverbs
 * usage: star [-b] [-o send|write|read] [-u SENDS] [-m BYTES] [-n CONNECTIONS] [-w UNDER_WAY] [-t SECONDS]
 * [-s NAME=VALUE] [-c NAME=VALUE]
 * -s and -c set the environment of the server or the client alone. Prints lines of a name and a number:
 * calls a second, or messages of a stream; the median and the 99th percentile of a call's time from its first
 * post to its answer (us; not of a stream); the CPU time of a message, of which a call has one more than
 * SENDs, at the server and at the client (us); the seconds to create and connect; what the server's process
 * grew by for a connection with all its queues (bytes); what its card keeps of a connection, and what the
 * library keeps because the card does not; how many of its connections are stateless; and how often a context
 * was not there, by calls or messages of a stream. */
#define _GNU_SOURCE
#include "side.h"
#include <dlfcn.h>

enum { MOST_UP = 3, INLINE = 64, BATCH = 32 };

/* Where the other side is, and its memory. */
struct side {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey;
};

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
static struct side other;
static uint32_t count = 1, under_way = 256, up = MOST_UP, bytes = 32;
static int barrier, stream;
/* Of a stream */
static enum ibv_wr_opcode opcode = IBV_WR_SEND;
/* Of `bytes` each: slots of the connections, and behind them what calls and answers are sent from */
static char *buffer, *source;

/* Messages of a stream that a connection has under way at most. */
static uint32_t depth(void)
{
	return under_way / count + 2;
}

/* Receives of a connection land in `each` slots of its own. */
static void open_card(uint32_t each)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	size_t slots = (size_t)count * each * bytes, room = slots + bytes;
	int access = IBV_ACCESS_LOCAL_WRITE | (stream ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ : 0);

	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)))
		die("no device");
	buffer = aligned_alloc(4096, (room + 4095) & ~(size_t)4095);
	connections = calloc(count, sizeof(*connections));
	idle = calloc(count, sizeof(*idle));
	if (!buffer || !connections || !idle)
		die("memory");
	memset(buffer, 0, room);
	source = buffer + slots;
	mr = ibv_reg_mr(pd, buffer, room, access);
	cq = ibv_create_cq(ctx, count * (stream ? 2 * depth() : up + 2) + 16, NULL, NULL, 0);
	if (!mr || !cq)
		die("no memory region, or no completion queue");
}

static void receive(struct connection *c, uint32_t slots)
{
	struct ibv_sge sge[MOST_UP];
	struct ibv_recv_wr wr[MOST_UP], *bad;

	for (uint32_t i = 0; i < slots; i++) {
		char *slot = buffer + ((size_t)c->number * slots + i) * bytes;

		sge[i] = (struct ibv_sge){ (uintptr_t)slot, bytes, mr->lkey };
		wr[i] = (struct ibv_recv_wr){ (uintptr_t)c, i + 1 < slots ? &wr[i + 1] : NULL, &sge[i], 1 };
	}
	if ((errno = ibv_post_recv(c->qp, wr, &bad)))
		die("ibv_post_recv");
}

/* Sends `messages`, of which the last gives a completion. */
static void send_to(struct connection *c, uint32_t messages)
{
	struct ibv_sge sge = { (uintptr_t)source, bytes, mr->lkey };
	struct ibv_send_wr wr[MOST_UP], *bad;
	int flags = bytes <= INLINE ? IBV_SEND_INLINE : 0;

	for (uint32_t i = 0; i < messages; i++)
		wr[i] = (struct ibv_send_wr){ .wr_id = (uintptr_t)c, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					      .next = i + 1 < messages ? &wr[i + 1] : NULL,
					      .send_flags = flags | (i + 1 < messages ? 0 : IBV_SEND_SIGNALED) };
	if ((errno = ibv_post_send(c->qp, wr, &bad)))
		die("ibv_post_send");
}

/* Posts the next message of a stream. False: the queue has no room. */
static int post(struct connection *c)
{
	size_t slot = (size_t)c->number * bytes;
	struct ibv_sge sge = { (uintptr_t)buffer + slot, bytes, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = (uintptr_t)c, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (opcode != IBV_WR_RDMA_READ && bytes <= INLINE)
		wr.send_flags |= IBV_SEND_INLINE;
	wr.wr.rdma.remote_addr = other.addr + slot;
	wr.wr.rdma.rkey = other.rkey;
	errno = ibv_post_send(c->qp, &wr, &bad);
	if (errno && errno != ENOMEM)
		die("ibv_post_send");
	return !errno;
}

/* All connections, each to the other side's; receives wait at both ends when this returns: a connection's
 * SENDs of a stream land in one slot. */
static void set_up(int fd, int first, uint32_t sends, uint32_t receives)
{
	uint32_t times = stream ? 1 : 2, slots = stream ? 1 : receives;
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { times * sends, times * receives, 1, 1, bytes <= INLINE ? bytes : 0 } };
	uint32_t *mine = calloc(count, sizeof(*mine)), *theirs = calloc(count, sizeof(*theirs));
	struct side me = { .addr = (uintptr_t)buffer, .rkey = mr->rkey };

	if (!mine || !theirs || ibv_query_gid(ctx, 1, 0, &me.gid))
		die("no GID");
	for (uint32_t i = 0; i < count; i++) {
		connections[i].number = i;
		idle[i] = &connections[i];
		if (!(connections[i].qp = ibv_create_qp(pd, &init)))
			die("ibv_create_qp");
		mine[i] = connections[i].qp->qp_num;
	}
	exchange(fd, first, &me, &other, sizeof(me));
	exchange(fd, first, mine, theirs, count * sizeof(*mine));
	for (uint32_t i = 0; i < count; i++) {
		connect_to(connections[i].qp, theirs[i], &other.gid);
		for (uint32_t posted = 0; posted < receives; posted += slots)
			receive(&connections[i], slots);
	}
	exchange(fd, first, &me, &me, 1);
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
	/* twice as many as come at once: who posts them again may be late */
	uint32_t receives = !stream ? up : opcode == IBV_WR_SEND ? 2 * depth() : 1;
	uint32_t ready = 0, sending = 0, answered = 0;
	uint64_t calls, missed;
	double before;

	take_cpu(1);
	set_all(server_sets);
	open_card(stream ? 1 : up);
	before = resident();
	set_up(fd, 0, 1, receives);
	before = (resident() - before) / count;
	missed = misses();
	for (uint32_t polls = 1;; polls++) {
		int got = polled(wc);

		for (int i = 0; i < got; i++) {
			struct connection *c = (void *)(uintptr_t)wc[i].wr_id;

			if (wc[i].opcode != IBV_WC_RECV) {
				sending--;
			} else if (stream) {
				receive(c, 1);
			} else if (++c->came == up) {
				c->came = 0;
				receive(c, up);
				idle[ready++] = c;
			}
		}
		/* without a barrier all that wait are answered, with one when they are all */
		if (!barrier || ready == count)
			for (; answered < ready && (!barrier || sending < under_way); sending++)
				send_to(idle[answered++], 1);
		if (answered == ready && (!barrier || ready == count))
			answered = ready = 0;
		if (polls % 4096 == 0 && recv(fd, &calls, sizeof(calls), MSG_DONTWAIT) == sizeof(calls))
			break;
	}
	printf("server_bytes %.0f\nmisses %.3f\n", before, (double)(misses() - missed) / calls);
	print_roles();
	return 0;
}

/* Messages of a stream, by one connection after the other, so many or for so many seconds; gives how many. */
static uint64_t drive_stream(uint64_t messages, double seconds)
{
	struct ibv_wc wc[BATCH];
	uint64_t posted = 0, done = 0;
	double end = now() + seconds;

	while (done < messages) {
		uint64_t before = done;

		while (posted < messages && posted - done < under_way && post(idle[posted % count]))
			posted++;
		done += polled(wc);
		if (before / 256 != done / 256 && now() > end)
			messages = posted;
	}
	return done;
}

static uint64_t drive(uint64_t calls, double seconds)
{
	if (stream)
		return drive_stream(calls, seconds);

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
			send_to(c, up);
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
	uint32_t messages = stream ? 1 : up + 1;
	clockid_t clock;
	uint64_t done, all;

	open_card(1);
	set_up(fd, 1, stream ? depth() : up, 1);
	connected = now() - start;
	if ((errno = clock_getcpuclockid(server, &clock)))
		die("the server's clock");
	shuffle(idle, count);
	/* every connection once, and all that warms up with time */
	all = drive(count, 60);
	all += drive(UINT64_MAX, seconds / 4);
	took = calloc(SAMPLES, sizeof(*took));
	start = now();
	cpu[0] = at(clock);
	cpu[1] = at(CLOCK_PROCESS_CPUTIME_ID);
	done = drive(UINT64_MAX, seconds);
	all += done;
	wall = now() - start;
	cpu[0] = at(clock) - cpu[0];
	cpu[1] = at(CLOCK_PROCESS_CPUTIME_ID) - cpu[1];
	printf("calls_per_second %.1f\n", done / wall);
	if (!stream)
		printf("median_us %.3f\np99_us %.3f\n", percentile(0.5), percentile(0.99));
	printf("server_cpu_us %.4f\nclient_cpu_us %.4f\n", cpu[0] * 1e6 / done / messages,
		cpu[1] * 1e6 / done / messages);
	printf("setup_seconds %.3f\n", connected);
	put(fd, &all, sizeof(all));
}

/* Whether there are such streams. */
static int choose_stream(const char *name)
{
	stream = 1;
	if (!strcmp(name, "write"))
		opcode = IBV_WR_RDMA_WRITE;
	else if (!strcmp(name, "read"))
		opcode = IBV_WR_RDMA_READ;
	else
		return !strcmp(name, "send");
	return 1;
}

int main(int argc, char **argv)
{
	int fd, option, server_settings = 0, client_settings = 0;
	double seconds = 1;
	pid_t server;

	while ((option = getopt(argc, argv, "bo:u:m:n:w:t:s:c:")) != -1) {
		if (option == 'b')
			barrier = 1;
		else if (option == 'o' && choose_stream(optarg))
			continue;
		else if (option == 'u')
			up = strtoul(optarg, NULL, 0);
		else if (option == 'm')
			bytes = strtoul(optarg, NULL, 0);
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
	if (!count || !under_way || !bytes || !up || up > MOST_UP || (stream && barrier))
		return 2;
	if (bytes > 1024)
		path_mtu = IBV_MTU_4096;
	reads = stream ? 16 : 1;
	server = start_server(serve, &fd);
	take_cpu(0);
	set_all(client_sets);
	work(fd, server, seconds);
	end_with(server);
}
