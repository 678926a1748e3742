//! What packets and doorbells that wait use of a connection, fetched into the CPU's caches meanwhile: hints.

use starverbs_core::env::{RecvQueue, SendQueue};

use super::Stateful;
use crate::env::StarEnv;
use crate::registry::RuleRegistry;
use crate::wire::Queue;

impl<E: StarEnv> Stateful<E> {
    /// A packet for it, which was fetched itself, is handled soon: what lies behind it.
    #[inline]
    pub(crate) fn expect(&self, env: &E, registry: &RuleRegistry) {
        let [ours, theirs] = &self.streams;
        self.local.sq.expect();
        self.window.expect(env);
        ours.expect(env, ours.una);
        theirs.expect(env, theirs.next);
        self.held.expect(env, theirs.next);
        self.sends.expect(env);
        self.rare.expect_inline(env);
        self.recvs.expect(env);
        self.completions[Queue::Send as usize].expect(env);
        registry.expect(env, self.conn);
    }

    /// A doorbell for it, which was fetched itself, is handled soon: what its requests use.
    #[inline]
    pub(crate) fn expect_requests(&self, env: &E, registry: &RuleRegistry) {
        let next = self.streams[0].next;
        self.window.expect_next(env);
        (0..2).for_each(|n| self.streams[0].expect(env, next.wrapping_add(n)));
        self.recvs.expect_at(env, self.next_recv);
        registry.expect(env, self.conn);
    }

    /// The same, soon: WQEs of this end.
    #[inline]
    pub(crate) fn expect_wqes(&self) {
        self.local.sq.expect_wqe(self.streams[0].una);
        if let Some(rq) = &self.local.rq {
            rq.expect_wqe();
        }
    }
}
