/* The same questions by TCP, which the server's program answers. Both sides poll without a break, as over
 * RDMA.
 * Part of strom.c. */
#ifndef TCP_H
#define TCP_H
#include <netinet/in.h>
#include <netinet/tcp.h>

/* What the client writes to the pipe before it asks by TCP, and what it asks. */
enum { BY_TCP = 't' };
enum asked { OF_ENTRY, OF_LIST, NO_MORE };

struct question {
	uint64_t key;
	uint32_t asked, bytes;
};

static int tcp;
static enum asked asked;

static void send_at_once(void)
{
	int on = 1;

	if (setsockopt(tcp, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		die("TCP_NODELAY");
}

/* The server's end: where it listens goes through the pipe. */
static void accept_client(int fd)
{
	struct sockaddr_in where = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(where);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (listener < 0 || bind(listener, (void *)&where, len) || listen(listener, 1) ||
	    getsockname(listener, (void *)&where, &len))
		die("a TCP socket that listens");
	put(fd, &where, sizeof(where));
	tcp = accept(listener, NULL, NULL);
	if (tcp < 0)
		die("accept");
	close(listener);
	send_at_once();
}

static void connect_to_server(int fd)
{
	struct sockaddr_in where;

	get(fd, &where, sizeof(where));
	tcp = socket(AF_INET, SOCK_STREAM, 0);
	if (tcp < 0 || connect(tcp, (void *)&where, sizeof(where)))
		die("connect");
	send_at_once();
}

static void take(void *to, size_t len)
{
	while (len) {
		ssize_t n = recv(tcp, to, len, MSG_DONTWAIT);

		if (!n || (n < 0 && errno != EAGAIN))
			die("the other side of TCP");
		if (n > 0) {
			to = (char *)to + n;
			len -= n;
		}
	}
}

/* Where the value of a key is: what the kernels find. */
static const void *find(const struct question *question)
{
	const struct element *element = store.list;

	if (question->asked == OF_ENTRY)
		for (int at = 0; at < 3; at++)
			if (le64toh(store.entries[question->key].buckets[at].key) == question->key)
				return (void *)(uintptr_t)le64toh(store.entries[question->key].buckets[at].value);
	while (le64toh(element->key) != question->key)
		element = (void *)(uintptr_t)le64toh(element->next);
	return (void *)(uintptr_t)le64toh(element->value);
}

/* The server, until the client asks no more. */
static void answer_questions(void)
{
	struct question question;

	for (take(&question, sizeof(question)); question.asked != NO_MORE; take(&question, sizeof(question)))
		put(tcp, find(&question), question.bytes);
}

static void ask_by_tcp(void)
{
	struct question question = { asked == OF_LIST ? length : which + 1, asked, size };

	put(tcp, &question, sizeof(question));
	take(local.data, size);
	got = local.data;
}

static void measure_tcp(int fd, const char *name, uint32_t number, enum asked what, double seconds)
{
	struct question last = { .asked = NO_MORE };

	asked = what;
	put(fd, &(char){ BY_TCP }, 1);
	measure(name, number, ask_by_tcp, seconds);
	put(tcp, &last, sizeof(last));
}

#endif
