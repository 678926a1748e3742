//! The books against a plain model: an owner for each page.

use proptest::prelude::*;

use super::*;

const END: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    Block(usize),
    Mapped,
    Kept,
    Lost,
}

#[derive(Clone, Debug)]
enum Step {
    Block(usize, u32),
    Free(usize),
    Resize(usize, usize),
    Map(usize),
    Unmap(usize, usize),
    Lose(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..END, 1..24usize);
    prop_oneof![
        (1..24usize, 0..4u32).prop_map(|(len, shift)| Step::Block(len, shift)),
        any::<usize>().prop_map(Step::Free),
        (any::<usize>(), 1..40usize).prop_map(|(which, len)| Step::Resize(which, len)),
        (1..24usize).prop_map(Step::Map),
        place().prop_map(|(start, len)| Step::Unmap(start, len)),
        place().prop_map(|(start, len)| Step::Lose(start, len)),
    ]
}

struct Model {
    space: Space,
    owners: [Owner; END],
}

impl Model {
    fn new() -> Model {
        let mut space = Space::new();
        space.give(0..END);
        Model { space, owners: [Owner::Nobody; END] }
    }

    fn set(&mut self, span: Span, owner: Owner) {
        span.for_each(|at| self.owners[at] = owner);
    }

    fn all(&self, span: &Span, owner: Owner) -> bool {
        span.end <= END && span.clone().all(|at| self.owners[at] == owner)
    }

    fn blocks(&self) -> Vec<usize> {
        (0..END).filter(|at| self.owners[*at] == Owner::Block(*at)).collect()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Block(len, shift) => {
                let Some((span, used)) = self.space.take_block(len, 1 << shift) else { return };
                assert!(span.len() >= len && span.start.is_multiple_of(1 << shift));
                assert!(self.all(&span, if used { Owner::Kept } else { Owner::Nobody }), "{span:?}");
                self.set(span.clone(), Owner::Block(span.start));
            }
            Step::Free(which) => {
                let blocks = self.blocks();
                let Some(&start) = blocks.get(which % blocks.len().max(1)) else { return };
                let span = self.space.forget_block(start).expect("a block");
                assert!(self.all(&span, Owner::Block(start)));
                self.set(span.clone(), Owner::Kept);
                for span in self.space.keep(span) {
                    self.set(span.clone(), Owner::Nobody);
                    self.space.give(span);
                }
            }
            Step::Resize(which, len) => {
                let blocks = self.blocks();
                let Some(&start) = blocks.get(which % blocks.len().max(1)) else { return };
                let old = self.space.block(start).expect("a block");
                let grows = old.end.max(start + len);
                let fits = self.all(&(old.end..grows), Owner::Nobody);
                let rest = self.space.resize_block(start, len);
                assert_eq!(rest.is_some(), fits);
                if let Some(rest) = rest {
                    self.set(start..start + len, Owner::Block(start));
                    self.set(rest.clone(), Owner::Nobody);
                    self.space.give(rest);
                }
            }
            Step::Map(len) => {
                if let Some(span) = self.space.take(len, 1) {
                    assert!(self.all(&span, Owner::Nobody));
                    self.set(span, Owner::Mapped);
                }
            }
            // What is malloc's is no place for munmap and MAP_FIXED.
            Step::Unmap(start, len) => {
                let span = start..(start + len).min(END);
                if span.clone().any(|at| matches!(self.owners[at], Owner::Block(_) | Owner::Kept)) {
                    return;
                }
                for part in self.space.used(&span) {
                    self.space.give(part);
                }
                self.set(span, Owner::Nobody);
            }
            Step::Lose(start, len) => {
                let span = start..(start + len).min(END);
                if self.all(&span, Owner::Mapped) {
                    self.space.lose(span.clone());
                    self.set(span, Owner::Lost);
                }
            }
        }
    }

    fn check(&self) {
        let inherits = self.space.inherited(&(0..END));
        for at in 0..END {
            let (page, owner) = (at..at + 1, self.owners[at]);
            assert_eq!(self.space.used(&page).is_empty(), owner == Owner::Nobody, "{at}");
            assert_eq!(self.space.is_shared(&page), !matches!(owner, Owner::Nobody | Owner::Lost), "{at}");
            let inherited = matches!(owner, Owner::Block(_) | Owner::Mapped);
            assert_eq!(inherits.iter().any(|span| span.contains(&at)), inherited, "{at}");
        }
    }
}

proptest! {
    #[test]
    fn no_page_has_two_owners(steps in prop::collection::vec(step(), 0..120)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
            model.check();
        }
    }
}

#[test]
fn what_is_kept_has_bounds() {
    let mut space = Space::new();
    assert_eq!(space.keep(0..KEPT_BYTES).first(), Some(&(0..KEPT_BYTES)), "too large to keep");
    let quarter = |n: usize| n * KEPT_BYTES / 4..(n + 1) * KEPT_BYTES / 4;
    (0..4).for_each(|n| assert!(space.keep(quarter(n)).is_empty()));
    assert_eq!(space.keep(quarter(4)).first(), Some(&quarter(0)), "the oldest goes");
    let mut space = Space::new();
    (0..KEPT_BLOCKS).for_each(|n| assert!(space.keep(n..n + 1).is_empty()));
    assert_eq!(space.keep(99..100).first(), Some(&(0..1)));
}

#[test]
fn a_kept_block_serves_about_its_size() {
    let mut space = Space::new();
    space.give(1000..2000);
    assert!(space.keep(0..100).is_empty());
    assert_eq!(space.take_block(80, 1), Some((1000..1080, false)), "too much would be wasted");
    assert_eq!(space.take_block(90, 1), Some((0..100, true)));
    assert_eq!(space.take_block(90, 1), Some((1080..1170, false)));
}
