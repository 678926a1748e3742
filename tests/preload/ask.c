/* NETLINK_RDMA through libc: how a socket behaves that asks for the device, and that others stay as they are.
 * Build: cc -Wall -o ask ask.c -lpthread; run with LD_PRELOAD naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_netlink.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../abi/check.h"

static const struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
/* A dump of devices, as rdma(8) asks for it first. */
static const struct nlmsghdr dump = {
	.nlmsg_len = sizeof(dump),
	.nlmsg_type = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET),
	.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_DUMP,
	.nlmsg_seq = 5,
};

static int opened(int protocol)
{
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol), on = 1;

	CHECK(fd >= 0 && !setsockopt(fd, SOL_NETLINK, NETLINK_EXT_ACK, &on, sizeof(on)));
	CHECK(!bind(fd, (const void *)&kernel, sizeof(kernel)));
	return fd;
}

static unsigned int port_of(int fd)
{
	struct sockaddr_nl own = {};
	socklen_t length = sizeof(own);

	CHECK(!getsockname(fd, (void *)&own, &length) && length == sizeof(own) && own.nl_family == AF_NETLINK);
	return own.nl_pid;
}

static int is_readable(int fd)
{
	struct pollfd look = { .fd = fd, .events = POLLIN };

	return poll(&look, 1, 0) == 1;
}

/* Whether the device and the end of the dump come, and nothing after them. */
static int is_answered(int fd, unsigned int port)
{
	union {
		struct nlmsghdr head;
		char bytes[8192];
	} message;
	int types[2], readable = is_readable(fd);

	for (int i = 0; i < 2; i++) {
		ssize_t n = recv(fd, &message, sizeof(message), MSG_DONTWAIT);

		types[i] = n > 0 && n == message.head.nlmsg_len && message.head.nlmsg_pid == port &&
					   message.head.nlmsg_seq == dump.nlmsg_seq ?
				   message.head.nlmsg_type : -1;
		if (!i && !memmem(message.bytes, sizeof(message), "star0", 6))
			return 0;
	}
	return readable && types[0] == dump.nlmsg_type && types[1] == NLMSG_DONE && !is_readable(fd);
}

/* Each way of sending, from descriptors that the library never saw, too. */
static void sending(void)
{
	char *bytes = (char *)&dump;
	struct iovec parts[] = { { bytes, 5 }, { NULL, 0 }, { bytes + 5, sizeof(dump) - 5 } };
	struct msghdr message = { (void *)&kernel, sizeof(kernel), parts, 3, NULL, 0, 0 };
	int fd = opened(NETLINK_RDMA), other, status;
	unsigned int port = port_of(fd);

	CHECK(port && !is_readable(fd));
	CHECK(send(fd, &dump, sizeof(dump), 0) == sizeof(dump) && is_answered(fd, port));
	CHECK(sendto(fd, &dump, sizeof(dump), 0, (const void *)&kernel, sizeof(kernel)) == sizeof(dump));
	CHECK(is_answered(fd, port));
	CHECK(sendmsg(fd, &message, MSG_DONTWAIT) == sizeof(dump) && is_answered(fd, port));
	message.msg_name = NULL;
	other = fcntl(fd, F_DUPFD, 100);
	CHECK(!close(fd) && sendmsg(other, &message, 0) == sizeof(dump) && is_answered(other, port));
	if (!fork())
		exit(send(other, &dump, sizeof(dump), 0) != sizeof(dump));
	CHECK(wait(&status) > 0 && !status && is_answered(other, port));
	CHECK(!close(other) && send(other, &dump, sizeof(dump), 0) == -1 && errno == EBADF);
	/* One that was never bound has a port from the first send on. */
	fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_NONBLOCK, NETLINK_RDMA);
	CHECK(send(fd, &dump, sizeof(dump), 0) == sizeof(dump) && is_answered(fd, port_of(fd)));
	close(fd);
}

/* What no program should send has no answer, or an error, and the next request is answered as ever. */
static void nonsense(void)
{
	static char noise[100000];
	int fd = opened(NETLINK_RDMA);
	char away[256];

	for (size_t i = 0; i < sizeof(noise); i++)
		noise[i] = rand();
	for (int n = 1; n < 64; n++)
		CHECK(send(fd, noise + n, n, 0) == n && (n >= (int)sizeof(dump) || !is_readable(fd)));
	CHECK(send(fd, noise, sizeof(noise), 0) == sizeof(noise) || errno == ENOBUFS);
	CHECK(sendto(fd, NULL, 16, 0, NULL, 0) == -1 && errno == EFAULT);
	CHECK(sendto(fd, &dump, sizeof(dump), 0, (const void *)&kernel, 4) == -1 && errno == EINVAL);
	/* Who never receives is told so, rather than kept waiting. */
	for (size_t i = 0; i + sizeof(dump) <= sizeof(noise); i += sizeof(dump))
		memcpy(noise + i, &dump, sizeof(dump));
	CHECK(send(fd, noise, sizeof(noise), 0) == -1 && errno == ENOBUFS);
	while (recv(fd, away, sizeof(away), MSG_DONTWAIT) >= 0)
		;
	CHECK(send(fd, &dump, sizeof(dump), 0) == sizeof(dump) && is_answered(fd, port_of(fd)));
	close(fd);
}

/* Sockets that are not for RDMA fail as they did, and succeed as they did. */
static void the_rest(void)
{
	struct sockaddr_in nobody = { AF_INET, 0, { htonl(INADDR_LOOPBACK) }, {} };
	struct sockaddr_nl group = { .nl_family = AF_NETLINK, .nl_groups = 1 };
	struct sockaddr_nl gone = { .nl_family = AF_NETLINK, .nl_pid = 0x7ffffff1 };
	int user = opened(NETLINK_USERSOCK), pair[2], udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	socklen_t length = sizeof(nobody);
	char byte;

	/* A port of which the owner is gone. */
	CHECK(!bind(udp, (void *)&nobody, length) && !getsockname(udp, (void *)&nobody, &length) && !close(udp));
	udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	CHECK(sendto(user, &dump, sizeof(dump), 0, (void *)&gone, sizeof(gone)) == -1 && errno == ECONNREFUSED);
	if (!geteuid())
		CHECK(sendto(user, &dump, sizeof(dump), 0, (void *)&group, sizeof(group)) == -1 && errno == ECONNREFUSED);
	CHECK(!is_readable(user));
	CHECK(!connect(udp, (void *)&nobody, sizeof(nobody)) && send(udp, "x", 1, 0) == 1);
	CHECK(poll(&(struct pollfd){ .fd = udp, .events = POLLIN }, 1, 5000) == 1);
	CHECK(send(udp, "x", 1, 0) == -1 && errno == ECONNREFUSED);
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && send(pair[0], "x", 1, 0) == 1);
	CHECK(read(pair[1], &byte, 1) == 1 && byte == 'x');
	CHECK(socket(AF_NETLINK, SOCK_RAW, 31) == -1 && socket(AF_INET, SOCK_DGRAM, NETLINK_RDMA) == -1);
	close(user), close(udp), close(pair[0]), close(pair[1]);
}

/* Sends until nothing more fits, and longer. */
static void *filling(void *how)
{
	static char bytes[4096];
	struct iovec part = { bytes, sizeof(bytes) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	int fd = *(int *)how;

	for (;;)
		if (fd % 3 == 0)
			send(fd, bytes, sizeof(bytes), 0);
		else if (fd % 3 == 1)
			sendto(fd, bytes, sizeof(bytes), 0, NULL, 0);
		else
			sendmsg(fd, &message, 0);
	return NULL;
}

/* A thread that waits in a send can be cancelled there: the stack is unwound through the library. */
static void cancelling(void)
{
	for (int way = 0; way < 3; way++) {
		int pair[2], fd = 300 + way;
		struct pollfd full = { .fd = fd, .events = POLLOUT };
		pthread_t thread;
		void *ended = NULL;

		CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && dup2(pair[0], fd) == fd && !close(pair[0]));
		CHECK(!pthread_create(&thread, NULL, filling, &fd));
		while (poll(&full, 1, 0))
			usleep(1000);
		CHECK(!pthread_cancel(thread) && !pthread_join(thread, &ended) && ended == PTHREAD_CANCELED);
		close(fd), close(pair[1]);
	}
}

int main(void)
{
	sending();
	cancelling();
	nonsense();
	the_rest();
	if (!failures)
		puts("ask: all as it should be");
	return failures != 0;
}
