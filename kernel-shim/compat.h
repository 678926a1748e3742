/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What kernels since 6.1 call differently. */
#ifndef STARVERBS_COMPAT_H
#define STARVERBS_COMPAT_H

#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/version.h>

static inline void star_eventfd_signal(struct eventfd_ctx *eventfd)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
	eventfd_signal(eventfd, 1);
#else
	eventfd_signal(eventfd);
#endif
}

static inline void star_vm_flags(struct vm_area_struct *vma, vm_flags_t set, vm_flags_t clear)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#else
	vm_flags_mod(vma, set, clear);
#endif
}

#endif
