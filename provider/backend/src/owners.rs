//! Which QPN blocks of this host are of one process. Its frames all come to one socket, whichever block the
//! first of a segmented send is for, so that they may share one.
//!
//! What is not known, or not so any more, costs a handing on.

/// By block: the least block of the process that has it, as far as known.
#[derive(Debug, Default)]
pub struct Owners(Vec<u16>);

/// Blocks that a QPN can name.
const BLOCKS: usize = 1 << 12;

impl Owners {
    /// Of processes with these blocks each; a block that two of them name is the first one's. Where each has
    /// one there is nothing to say.
    pub(crate) fn new<'a>(processes: impl Iterator<Item = &'a [u16]>) -> Owners {
        const NOBODY: u16 = u16::MAX;
        let mut owners = vec![NOBODY; BLOCKS];
        let mut shared = false;
        for blocks in processes {
            let is_free = |block: &&u16| owners.get(usize::from(**block)) == Some(&NOBODY);
            let own: Vec<u16> = blocks.iter().filter(is_free).copied().collect();
            let first = own.iter().min().copied().unwrap_or_default();
            shared |= own.len() > 1;
            own.iter().for_each(|block| owners[usize::from(*block)] = first);
        }
        if !shared {
            return Owners::default();
        }
        for (block, first) in (0..).zip(&mut owners) {
            if *first == NOBODY {
                *first = block;
            }
        }
        Owners(owners)
    }

    /// Whether each block is known to be its process's only one, or nothing is known.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A block that stands for all of the process that has `block`.
    #[inline]
    pub(crate) fn of(&self, block: u32) -> u32 {
        self.0.get(block as usize).map_or(block, |first| u32::from(*first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_process_have_one_name() {
        let owners = Owners::new([&[7u16, 5, 900][..], &[8], &[40, 41]].into_iter());
        assert_eq!(
            [5, 7, 900, 8, 40, 41, 6, 4095].map(|block| owners.of(block)),
            [5, 5, 5, 8, 40, 40, 6, 4095]
        );
        let alone = Owners::new([&[7u16][..], &[8]].into_iter());
        assert!(alone.is_empty() && alone.of(7) == 7);
        let old = Owners::new([&[5u16, 30][..], &[5, 6, 2], &[8, 40]].into_iter());
        assert_eq!(
            [5, 30, 6, 2, 8, 40].map(|block| old.of(block)),
            [5, 5, 2, 2, 8, 8],
            "a dead one's comes last"
        );
        let odd = Owners::new([&[7u16, u16::MAX][..]].into_iter());
        assert_eq!((odd.of(7), odd.of(0xffff)), (7, 0xffff), "what no QPN names");
    }
}
