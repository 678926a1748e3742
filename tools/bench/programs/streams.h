/* Streams of strom.c: written, shuffled and sketched, on their way or before or after it. */
#ifndef STREAMS_H
#define STREAMS_H

/* HyperLogLog over 32-bit items, as the card's kernel has it: MurmurHash3 x64 128, first word. */
static uint8_t registers[1 << REGISTERS];

static uint64_t mixed(uint64_t word)
{
	word = (word ^ word >> 33) * 0xff51afd7ed558ccdu;
	word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53u;
	return word ^ word >> 33;
}

static void sketch(const uint8_t *items, size_t bytes)
{
	for (size_t at = 0; at < bytes; at += 4) {
		uint32_t item;
		uint64_t first, second = 4, rank;

		memcpy(&item, items + at, sizeof(item));
		first = (uint64_t)le32toh(item) * 0x87c37b91114253d5u;
		first = (first << 31 | first >> 33) * 0x4cf5ad432745937fu;
		first = (first ^ 4) + second;
		second += first;
		first = mixed(first) + mixed(second);
		rank = first << REGISTERS ? (uint64_t)__builtin_clzll(first << REGISTERS) + 1 : 64 - REGISTERS + 1;
		if (registers[first >> (64 - REGISTERS)] < rank)
			registers[first >> (64 - REGISTERS)] = (uint8_t)rank;
	}
}

static void await_stream(void)
{
	struct ibv_recv_wr receive = { 0 }, *bad;

	if ((errno = ibv_post_recv(qp, &receive, &bad)))
		die("ibv_post_recv");
}

/* A stream came: sketches it, and tells the client. */
static void sketch_stream(void)
{
	static uint64_t streams;
	struct ibv_sge sge = { (uintptr_t)&streams, sizeof(streams), 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_INLINE }, *bad;

	sketch(store.stream, STREAM);
	streams++;
	wr.wr.rdma.remote_addr = peer.addr + ((char *)&local.sketched - (char *)&local);
	wr.wr.rdma.rkey = peer.rkey;
	if ((errno = ibv_post_send(qp, &wr, &bad)))
		die("ibv_post_send");
	await_stream();
}

/* Sends the stream to where it goes, or to a kernel; with `tell`, the server hears of its end. */
static void send_stream(uint64_t op, int tell)
{
	for (uint32_t at = 0; at < STREAM; at += PIECE) {
		struct ibv_sge sge = { (uintptr_t)local.stream + at, PIECE, mr->lkey };
		struct stardv_rpc_wr rpc = { 0, 0, op, &sge, 1, 0 };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;

		if (tell && at + PIECE == STREAM)
			wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.wr.rdma.remote_addr = STORED(store.stream) + at;
		wr.wr.rdma.rkey = peer.rkey;
		while (owed >= WINDOW)
			complete(0);
		if ((errno = op ? post_rpc_write(qp, &rpc, sizeof(rpc)) : ibv_post_send(qp, &wr, &bad)))
			die("a stream");
		owed++;
	}
	complete(1);
}

static void write_stream(void)
{
	send_stream(0, 0);
}

static void sketch_by_rpc(void)
{
	send_stream(OP_HLL | by, 0);
}

static void sketch_after_write(void)
{
	static uint64_t streams;

	send_stream(0, 1);
	for (streams++; __atomic_load_n(&local.sketched, __ATOMIC_ACQUIRE) != streams;)
		ibv_poll_cq(cq, 0, NULL);
}

static void ask_shuffle(uint32_t command, uint32_t number, uint32_t first, uint32_t places, uint32_t len)
{
	struct {
		struct stardv_shuffle shuffle;
		struct stardv_partition places[DESCRIBED];
	} params = { { htole32(command), htole32(number), htole32(first), 0 }, { { 0 } } };

	for (uint32_t at = 0; at < places; at++)
		params.places[at] = (struct stardv_partition){ htole64(STORED(store.partitions[first + at])),
							       htole64(ROOM) };
	call(OP_SHUFFLE | by, &params, sizeof(params.shuffle) + places * sizeof(params.places[0]), len);
}

static void shuffle_by_rpc(void)
{
	ask_shuffle(STARDV_SHUFFLE_BEGIN, 10, 0, 0, 0);
	for (uint32_t first = 0; first < PARTITIONS; first += DESCRIBED)
		ask_shuffle(STARDV_SHUFFLE_HISTOGRAM, peer.rkey, first, DESCRIBED, 0);
	send_stream(OP_SHUFFLE | by, 0);
	ask_shuffle(STARDV_SHUFFLE_FLUSH, 0, 0, 0, sizeof(uint64_t));
}

/* The sender gathers 16 values of a partition, and writes them (Barthels et al., the paper's baseline). */
static void shuffle_by_writes(void)
{
	static uint64_t gathered[PARTITIONS][GATHERED];
	static uint32_t waiting[PARTITIONS], written[PARTITIONS];

	memset(written, 0, sizeof(written));
	for (uint32_t at = 0; at <= STREAM; at += sizeof(uint64_t)) {
		uint32_t first = 0, last = PARTITIONS - 1;
		uint64_t value;

		if (at < STREAM) {
			memcpy(&value, local.stream + at, sizeof(value));
			first = last = le64toh(value) % PARTITIONS;
			gathered[first][waiting[first]++] = value;
			if (waiting[first] < GATHERED)
				continue;
		}
		for (uint32_t lane = first; lane <= last; lane++) {
			struct ibv_sge sge = { (uintptr_t)gathered[lane], waiting[lane] * (uint32_t)sizeof(uint64_t), 0 };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
						  .send_flags = IBV_SEND_INLINE }, *bad;

			wr.wr.rdma.remote_addr = STORED(store.partitions[lane]) + written[lane];
			wr.wr.rdma.rkey = peer.rkey;
			written[lane] += sge.length;
			waiting[lane] = 0;
			while (owed >= WINDOW)
				complete(0);
			if (sge.length && (errno = ibv_post_send(qp, &wr, &bad)))
				die("ibv_post_send");
			owed += sge.length > 0;
		}
	}
	complete(1);
}

static void measure_streams(double seconds)
{
	uint64_t state = 1;

	for (size_t at = 0; at < STREAM; at += sizeof(state)) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		/* the low bits of such a generator are poor */
		memcpy(local.stream + at, &(uint64_t){ state >> 32 | state << 32 }, sizeof(state));
	}
	/* none of the bytes that others look at */
	size = CRC;
	measure("stream.write", STREAM >> 20, write_stream, seconds);
	measure_rpc("shuffle", STREAM >> 20, shuffle_by_rpc, seconds);
	measure("stream.sender", STREAM >> 20, shuffle_by_writes, seconds);
	measure_rpc("hll", STREAM >> 20, sketch_by_rpc, seconds);
	measure("stream.cpu", STREAM >> 20, sketch_after_write, seconds);
}

#endif
