/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A key-value cache with replicas, by 1RMA: no connections, encrypted, and a client that finds a replica gone
 * or its key changed goes on at once.
 *
 *	cache serve FILE		a replica, until SIGTERM; its line in FILE is what clients need
 *	cache put FILE KEY VALUE	writes to all replicas; one writer at a time
 *	cache get FILE KEY ...
 *	cache watch FILE KEY SECONDS	reads all the time: the longest pause between two values
 *
 * A line is address, region, and two keys: the present one, and the one to come, which SIGHUP makes the
 * replica take. Who reads FILE reads and writes the cache: it reaches other hosts over TLS (starverbs keys).
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

#include <infiniband/stardv.h>

enum { SLOTS = 256, KEY = 24, VALUE = 88, REPLICAS = 8, TRIES = 1000, KEY_LEN = STARDV_ONERMA_KEY_LEN };

/* 128 bytes, the same on every machine; a WRITE moves one. */
struct slot {
	uint64_t version;
	char key[KEY];
	char value[VALUE];
	/* Of all before it: a READ may see a slot that is just being written */
	uint64_t sum;
};

struct replica {
	union ibv_gid gid;
	uint32_t region;
	uint8_t keys[2][KEY_LEN];
	/* Which of them opens it; whether it is asked no more */
	int key;
	int gone;
};

static struct stardv_onerma *card;
static union ibv_gid own;
static uint32_t pid;
static struct replica replicas[REPLICAS];
static int count;
/* The table of a replica; of a client, the slot that is read or written */
static struct slot slots[SLOTS];
static uint32_t region;
static unsigned long key_changes, failures;
static volatile sig_atomic_t ended, rotate;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* FNV-1a. */
static uint64_t hash(const void *bytes, size_t length)
{
	uint64_t sum = 0xcbf29ce484222325;

	for (const unsigned char *at = bytes; length--; at++)
		sum = (sum ^ *at) * 0x100000001b3;
	return sum;
}

static void open_card(uint32_t rights, const uint8_t *key)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct stardv_onerma_attr attr = { .gid_index = 0 };
	struct stardv_onerma_region_attr memory = { .addr = slots, .length = sizeof(slots), .rights = rights };

	if (!ctx || ibv_query_gid(ctx, 1, 0, &own))
		die("no device");
	ibv_free_device_list(list);
	/* Names this process to those that check its keys. */
	if (getrandom(&pid, sizeof(pid), 0) != sizeof(pid))
		die("getrandom");
	attr.pid = pid |= 1;
	card = stardv_onerma_open(ctx, &attr, sizeof(attr));
	if (!card)
		die("stardv_onerma_open");
	memcpy(memory.key, key, KEY_LEN);
	if (stardv_onerma_create_region(card, &memory, sizeof(memory), &region))
		die("stardv_onerma_create_region");
}

static void on_signal(int signal)
{
	if (signal == SIGHUP)
		rotate = 1;
	else
		ended = 1;
}

static void print_key(FILE *to, const uint8_t *key)
{
	putc(' ', to);
	for (int i = 0; i < KEY_LEN; i++)
		fprintf(to, "%02x", key[i]);
}

static void serve(const char *path)
{
	uint8_t keys[2][KEY_LEN];
	char name[INET6_ADDRSTRLEN];
	FILE *file;

	if (getrandom(keys, sizeof(keys), 0) != sizeof(keys))
		die("getrandom");
	signal(SIGHUP, on_signal);
	signal(SIGTERM, on_signal);
	open_card(STARDV_ONERMA_REMOTE_READ | STARDV_ONERMA_REMOTE_WRITE, keys[0]);
	/* The keys are its owner's alone. */
	umask(077);
	file = fopen(path, "a");
	if (!file)
		die(path);
	fprintf(file, "%s %" PRIu32, inet_ntop(AF_INET6, &own, name, sizeof(name)), region);
	print_key(file, keys[0]);
	print_key(file, keys[1]);
	fprintf(file, "\n");
	if (fclose(file))
		die(path);
	while (!ended) {
		/* Nothing but the card's work: to answer. */
		if (stardv_onerma_poll(card, 0, NULL, 100) < 0)
			die("stardv_onerma_poll");
		if (rotate && !stardv_onerma_set_key(card, region, keys[1]))
			rotate = 0;
	}
	/* From here on every operation fails at once. */
	stardv_onerma_destroy_region(card, region);
	stardv_onerma_close(card);
}

static int parse_key(const char *text, uint8_t *key)
{
	for (int i = 0; i < KEY_LEN; i++)
		if (sscanf(text + 2 * i, "%2hhx", &key[i]) != 1)
			return -1;
	return 0;
}

static void read_replicas(const char *path)
{
	FILE *file = fopen(path, "r");
	char name[INET6_ADDRSTRLEN], keys[2][2 * KEY_LEN + 1];

	if (!file)
		die(path);
	while (count < REPLICAS) {
		struct replica *to = &replicas[count];

		if (fscanf(file, "%45s %" SCNu32 " %32s %32s", name, &to->region, keys[0], keys[1]) != 4)
			break;
		if (inet_pton(AF_INET6, name, &to->gid) != 1 || parse_key(keys[0], to->keys[0]) ||
		    parse_key(keys[1], to->keys[1])) {
			fprintf(stderr, "%s: line %d is no replica's\n", path, count + 1);
			exit(1);
		}
		count++;
	}
	fclose(file);
	if (!count) {
		fprintf(stderr, "%s: no replica has its line there\n", path);
		exit(1);
	}
}

/* One command, and its end. */
static uint32_t once(const struct replica *to, uint32_t op, unsigned at)
{
	struct stardv_onerma_wr wr = { .op = op, .remote = to->gid, .length = sizeof(struct slot) };
	struct stardv_onerma_wc wc;

	wr.remote_region = to->region;
	wr.remote_offset = at * sizeof(struct slot);
	wr.local_region = region;
	if (stardv_onerma_derive_key(to->keys[to->key], &own, pid, op, wr.key) ||
	    stardv_onerma_post(card, &wr, sizeof(wr)) || stardv_onerma_poll(card, 1, &wc, -1) != 1)
		die("stardv_onerma_post");
	return wc.status;
}

/* A slot of a replica to or from ours, with the key that it has now: 0, or -1 if the replica is gone. */
static int access_slot(struct replica *to, uint32_t op, unsigned at)
{
	uint32_t status = once(to, op, at);

	if (status == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE && to->key == 0) {
		/* It has the next key, or there is no such region any more. */
		to->key = 1;
		key_changes++;
		printf("replica %td: the next key\n", to - replicas);
		status = once(to, op, at);
	}
	if (status == STARDV_ONERMA_OK)
		return 0;
	to->gone = 1;
	failures++;
	printf("replica %td: fails with status %" PRIu32 "\n", to - replicas, status);
	return -1;
}

/* Finds the key's slot of a replica, or the first free one: its place, or -1. */
static int find(struct replica *in, const char *key)
{
	uint64_t first = hash(key, strlen(key));

	for (unsigned probe = 0; probe < SLOTS; probe++) {
		unsigned at = (first + probe) % SLOTS;
		int whole = 0;

		for (int tries = 0; tries < TRIES && !whole; tries++) {
			if (access_slot(in, STARDV_ONERMA_READ, at))
				return -1;
			whole = !slots->version || slots->sum == hash(slots, offsetof(struct slot, sum));
		}
		if (!whole)
			return -1;
		if (!slots->version || !strncmp(slots->key, key, KEY))
			return (int)at;
	}
	return -1;
}

/* Reads from the first replica that answers: whether the key is there. */
static int get(const char *key)
{
	for (int i = 0; i < count; i++)
		if (!replicas[i].gone && find(&replicas[i], key) >= 0)
			return slots->version != 0;
	fprintf(stderr, "no replica answers\n");
	exit(1);
}

static void put(const char *key, const char *value)
{
	int written = 0;

	for (int i = 0; i < count; i++) {
		int at = find(&replicas[i], key);

		if (at < 0)
			continue;
		slots->version++;
		snprintf(slots->key, KEY, "%s", key);
		snprintf(slots->value, VALUE, "%s", value);
		slots->sum = hash(slots, offsetof(struct slot, sum));
		written += !access_slot(&replicas[i], STARDV_ONERMA_WRITE, (unsigned)at);
	}
	printf("written to %d of %d replicas\n", written, count);
	if (!written)
		exit(1);
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + now.tv_nsec / 1e9;
}

static void watch(const char *key, double time)
{
	double start = seconds(), last = start, longest = 0;
	unsigned long gets = 0;

	signal(SIGTERM, on_signal);
	for (; !ended && last - start < time; gets++) {
		double now;

		if (!get(key)) {
			fprintf(stderr, "%s is not there\n", key);
			exit(1);
		}
		now = seconds();
		if (now - last > longest)
			longest = now - last;
		last = now;
	}
	printf("%lu values, %.1f us each, longest pause %.1f us; new keys: %lu, replicas that failed: %lu\n",
	       gets, (last - start) / gets * 1e6, longest * 1e6, key_changes, failures);
}

int main(int argc, char **argv)
{
	static const uint8_t local[KEY_LEN] = "nobody is asked.";

	if (argc == 3 && !strcmp(argv[1], "serve")) {
		serve(argv[2]);
		return 0;
	}
	if (argc < 4) {
		fputs("usage: cache serve FILE | put FILE KEY VALUE | get FILE KEY ... | watch FILE KEY SECONDS\n",
		      stderr);
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	read_replicas(argv[2]);
	open_card(STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE, local);
	if (!strcmp(argv[1], "put") && argc == 5)
		put(argv[3], argv[4]);
	else if (!strcmp(argv[1], "watch") && argc == 5)
		watch(argv[3], atof(argv[4]));
	else if (!strcmp(argv[1], "get"))
		for (int i = 3; i < argc; i++)
			printf(get(argv[i]) ? "%s: %.*s\n" : "%s is not there\n", argv[i], VALUE, slots->value);
	stardv_onerma_close(card);
	return 0;
}
