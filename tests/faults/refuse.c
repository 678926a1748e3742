/* A kernel that refuses to send, preloaded: while the file that REFUSE names holds an errno, of `share`
 * calls in 256 that send to the network one fails with it. Two numbers: errno, share. */
#include "shim.h"
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <sys/socket.h>

static volatile int32_t *how;
static uint32_t calls;

static __attribute__((constructor)) void begin(void)
{
	how = numbers("REFUSE", 8);
}

/* Unix sockets are not the network: they carry no address, or another kind. */
static int refused(const struct sockaddr *to)
{
	if (!how || !how[0] || !to || (to->sa_family != AF_INET && to->sa_family != AF_INET6))
		return 0;
	if ((__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) * 2654435761u >> 24) >= (uint32_t)how[1])
		return 0;
	errno = how[0];
	return 1;
}

ssize_t sendto(int fd, const void *bytes, size_t len, int flags, const struct sockaddr *to, socklen_t to_len)
{
	return refused(to) ? -1 : syscall(SYS_sendto, fd, bytes, len, flags, to, to_len);
}

ssize_t sendmsg(int fd, const struct msghdr *m, int flags)
{
	return refused(m->msg_name) ? -1 : syscall(SYS_sendmsg, fd, m, flags);
}

int sendmmsg(int fd, struct mmsghdr *list, unsigned int count, int flags)
{
	return count && refused(list[0].msg_hdr.msg_name) ? -1 : (int)syscall(SYS_sendmmsg, fd, list, count, flags);
}
