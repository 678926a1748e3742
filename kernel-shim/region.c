// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Regions: memory of a program that the board reaches.
 *
 * Its pages are pinned for long and accounted to the process. The board gets their DMA addresses in a table,
 * in pages as large as they allow, or one address if they are one piece.
 */
#include <linux/dma-mapping.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "starverbs.h"

/* log2 of the smallest and the largest page of a translation table */
#define STAR_MIN_PAGE_LOG 12
#define STAR_MAX_PAGE_LOG 30

/* Pins the pages of a region, as far as they go, and adds them to its list */
static int star_region_pin_pages(struct star_region *region)
{
	unsigned long at = region->addr & PAGE_MASK;
	unsigned long left = region->pages;
	struct page **pages;
	int err = 0;

	pages = (struct page **)__get_free_page(GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	while (left) {
		int want = min_t(unsigned long, left, PAGE_SIZE / sizeof(*pages));
		int pinned;

		cond_resched();
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		pinned = star_pin_pages(at, want, region->writable, pages);
		if (pinned <= 0) {
			err = pinned ? pinned : -EFAULT;
			break;
		}
		left -= pinned;
		at += (unsigned long)pinned << PAGE_SHIFT;
		err = sg_alloc_append_table_from_pages(&region->sg, pages, pinned, 0,
						       (unsigned long)pinned << PAGE_SHIFT, UINT_MAX,
						       left, GFP_KERNEL_ACCOUNT);
		if (err) {
			unpin_user_pages(pages, pinned);
			break;
		}
	}
	free_page((unsigned long)pages);
	return err;
}

static void star_region_unpin(struct star_region *region)
{
	struct scatterlist *sg;
	unsigned int i;

	for_each_sgtable_sg(&region->sg.sgt, sg, i)
		unpin_user_page_range_dirty_lock(sg_page(sg), DIV_ROUND_UP(sg->length, PAGE_SIZE),
						 region->writable);
	sg_free_append_table(&region->sg);
}

/*
 * Pins memory of the process that calls. Under no lock, as this may wait for whatever serves its pages.
 * -EFAULT: there is no such memory, or not for writing; -ENOMEM: beyond RLIMIT_MEMLOCK.
 */
struct star_region *star_region_pin(u64 addr, u64 length, bool writable)
{
	struct star_region *region;
	u64 end;
	int err;

	if (check_add_overflow(addr, length, &end) || end > U64_MAX - PAGE_SIZE)
		return ERR_PTR(-EFAULT);
	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return ERR_PTR(-ENOMEM);
	region->addr = addr;
	region->length = length;
	region->writable = writable;
	region->pages = length ? (PAGE_ALIGN(end) - (addr & PAGE_MASK)) >> PAGE_SHIFT : 0;
	err = -EINVAL;
	if (region->pages > INT_MAX)
		goto free;
	region->mm = current->mm;
	err = star_account(region->mm, region->pages);
	if (err)
		goto free;
	mmgrab(region->mm);
	err = star_region_pin_pages(region);
	if (!err)
		return region;
	star_region_unpin(region);
	star_unaccount(region->mm, region->pages);
	mmdrop(region->mm);
free:
	kfree(region);
	return ERR_PTR(err);
}

static enum dma_data_direction star_direction(struct star_region *region)
{
	return region->writable ? DMA_BIDIRECTIONAL : DMA_TO_DEVICE;
}

/* The largest pages: all places of the region but the first begin, and all but the last end, at a page */
static u32 star_region_page_log(struct star_region *region)
{
	struct scatterlist *sg;
	u64 borders = 0, end = 0;
	unsigned int i;

	for_each_sgtable_dma_sg(&region->sg.sgt, sg, i) {
		if (i && sg_dma_address(sg) != end)
			borders |= sg_dma_address(sg) | end;
		end = sg_dma_address(sg) + sg_dma_len(sg);
	}
	return borders ? min_t(u32, __ffs64(borders), STAR_MAX_PAGE_LOG) : STAR_MAX_PAGE_LOG;
}

/* Counts the pages of the region, and writes their addresses into its table if it has one */
static u64 star_region_list(struct star_region *region)
{
	u64 page = 1ULL << region->page_log;
	u64 pieces = 0, next = 0;
	struct scatterlist *sg;
	unsigned int i;

	for_each_sgtable_dma_sg(&region->sg.sgt, sg, i) {
		u64 from = sg_dma_address(sg), end = from + sg_dma_len(sg);

		/* what goes on in the page that was listed last is in it */
		if (pieces && from < next && from > next - page)
			from = next;
		for (from &= ~(page - 1); from < end; from += page) {
			if (region->table)
				region->table[pieces] = cpu_to_le64(from);
			pieces++;
			next = from + page;
		}
	}
	return pieces;
}

/* Makes the table, for a region that lies in several places */
static int star_region_make_table(struct star_board *board, struct star_region *region, u64 first)
{
	u64 pieces;

	if (region->page_log < STAR_MIN_PAGE_LOG)
		return -EIO;
	pieces = star_region_list(region);
	if (pieces > U32_MAX)
		return -ENOMEM;
	region->pieces = pieces;
	region->offset = first & ((1ULL << region->page_log) - 1);
	region->table_bytes = pieces * sizeof(*region->table);
	region->table = dma_alloc_coherent(&board->pdev->dev, region->table_bytes, &region->dma,
					   GFP_KERNEL | __GFP_NOWARN);
	if (!region->table)
		return -ENOMEM;
	star_region_list(region);
	return 0;
}

/*
 * Lets the board reach the region. -EOPNOTSUPP: it lies in several places, and the board has no tables;
 * -ENOMEM: its table would be too large.
 */
int star_region_map(struct star_board *board, struct star_region *region)
{
	struct device *dev = &board->pdev->dev;
	u64 first;
	int err;

	if (!region->pages)
		return 0;
	err = dma_map_sgtable(dev, &region->sg.sgt, star_direction(region), 0);
	if (err)
		return err;
	region->is_mapped = true;
	first = sg_dma_address(region->sg.sgt.sgl) + offset_in_page(region->addr);
	region->page_log = star_region_page_log(region);
	if (region->page_log == STAR_MAX_PAGE_LOG && star_region_list(region) == 1) {
		region->page_log = 0;
		region->dma = first;
		return 0;
	}
	if (!(board->caps & STARVERBS_CAP_MTT))
		return -EOPNOTSUPP;
	return star_region_make_table(board, region, first);
}

/* Ends a region that the board does not reach any more, or never did */
void star_region_free(struct star_board *board, struct star_region *region)
{
	if (region->table)
		dma_free_coherent(&board->pdev->dev, region->table_bytes, region->table, region->dma);
	if (region->is_mapped)
		dma_unmap_sgtable(&board->pdev->dev, &region->sg.sgt, star_direction(region), 0);
	star_region_unpin(region);
	star_unaccount(region->mm, region->pages);
	mmdrop(region->mm);
	kfree(region);
}
