//! The watch over local connections: peers that are gone or silent, and proposals that nobody answers.
//!
//! Owns when it is looked, and what follows.

use starverbs_backend::{ChannelNews, SessionId};
use starverbs_core::Nanos;

use super::agreement::PATIENCE;
use super::channels::Channels;
use super::turn::{self, with_end};
use super::{LocalHost, Path, QpEntry};
use crate::device::soft::env::NicEnv;

/// How often it is looked whether a peer is silent.
const CHECK: Nanos = 50_000_000;

/// For how many looks a QP with a preference, and without a request, waits for its peer's proposal: the peer
/// may wait for its role, by packets, and send no request before.
const ROLES_PATIENCE: u32 = 40 + PATIENCE;

impl LocalHost {
    /// Something has become of a channel.
    #[cold]
    pub(super) fn on_news(&mut self, (nic, env): NicEnv<'_>, news: ChannelNews, now: Nanos) {
        match news {
            ChannelNews::Opened(session, channel, memory) => {
                env.channels.add_answerer(Some(session), *channel, memory);
            }
            ChannelNews::Doorbell(session, doorbell) => env.channels.take_doorbell(session, &doorbell),
            ChannelNews::Woken(session) => env.channels.await_again(session),
            ChannelNews::Broken => nic.counters().local_broken.inc(),
            ChannelNews::Ended(session) => {
                self.take_last((nic, env), session, now);
                for asker in env.channels.askers.iter_mut().flatten() {
                    asker.ended |= asker.session == Some(session);
                }
                for answerer in &mut env.channels.answerers {
                    answerer.ended |= answerer.session == Some(session);
                }
                for entry in self.qps.values_mut() {
                    entry.theirs.retain(|theirs| theirs.session != Some(session));
                }
                self.drop_broken((nic, env), now);
            }
        }
    }

    /// What a process asked before its session ended is executed; not what it still writes.
    #[cold]
    fn take_last(&mut self, (nic, env): NicEnv<'_>, session: SessionId, now: Nanos) {
        for at in 0..env.channels.answerers.len() {
            let Some(answerer) = env.channels.answerers.get(at) else { return };
            if answerer.session != Some(session) {
                continue;
            }
            let mut left = answerer.channel.requests.slots();
            while left > 0 && env.channels.answerers.get(at).is_some_and(|answerer| !answerer.ended) {
                let taken = turn::answer_channel((nic, env), at, now);
                if let Some(control) = env.channels.inbound_control.take() {
                    self.on_control((nic, env), &control, now);
                }
                left = if taken == 0 { 0 } else { left.saturating_sub(taken) };
            }
        }
    }

    /// QPs whose channel is over lose their peer.
    #[cold]
    pub(super) fn drop_broken(&mut self, (nic, env): NicEnv<'_>, now: Nanos) {
        if std::mem::take(&mut env.channels.broken) {
            nic.counters().local_broken.inc();
        }
        turn::take_answers((nic, env), now);
        let mut lost = Vec::new();
        for (qpn, entry) in &self.qps {
            let Some(ours) = entry.ours.filter(|_| entry.path != Path::Wire) else { continue };
            if env.channels.asker(ours.channel).is_none_or(|asker| asker.ended) {
                lost.push((*qpn, entry.path));
            }
        }
        for (qpn, path) in lost {
            if path == Path::Asking {
                self.use_wire((nic, env), qpn, now);
            } else {
                with_end((nic, env), qpn, now, |end, _| end.lose_peer());
            }
        }
        env.channels.drop_ended();
    }

    /// Looks at what waits for too long.
    pub(in super::super) fn check(&mut self, (nic, env): NicEnv<'_>, now: Nanos) {
        if now.saturating_sub(self.checked) < CHECK || self.asking + self.active == 0 {
            return;
        }
        self.checked = now;
        if self.asking > 0 {
            self.end_waiting((nic, env), now);
        }
        for at in 0..env.channels.askers.len() as u32 {
            let Some(asker) = env.channels.asker(at).filter(|asker| !asker.ended) else { continue };
            let Ok(read) = asker.channel.requests.look() else { continue };
            let quiet = asker.quiet_for(read, now);
            if quiet > 2 * CHECK {
                self.on_silence((nic, env), at, quiet, now);
            }
        }
    }

    #[cold]
    fn on_silence(&self, (nic, env): NicEnv<'_>, channel: u32, quiet: Nanos, now: Nanos) {
        let uses = |entry: &QpEntry| {
            entry.path == Path::Local && entry.ours.is_some_and(|ours| ours.channel == channel)
        };
        for (qpn, _) in self.qps.iter().filter(|(_, entry)| uses(entry)) {
            with_end((nic, env), *qpn, now, |end, ctx| end.on_silence(ctx, quiet));
        }
    }

    /// QPs whose program waits for a proposal that does not come use the wire, as do those to which the peer
    /// has sent a packet.
    #[cold]
    pub(super) fn end_waiting(&mut self, (nic, env): NicEnv<'_>, now: Nanos) {
        let mut over = Vec::new();
        for (qpn, entry) in self.qps.iter_mut().filter(|(_, entry)| entry.path == Path::Asking) {
            let (posts, asks) = (nic.has_posts(*qpn), entry.preference.is_some());
            let Some(ours) = &mut entry.ours else { continue };
            ours.waited += u32::from(posts || asks);
            let patience = if posts { PATIENCE } else { ROLES_PATIENCE };
            if !nic.is_held(*qpn) || ours.waited >= patience {
                over.push(*qpn);
            }
        }
        for qpn in over {
            self.use_wire((nic, env), qpn, now);
        }
        let mut asking = self.qps.iter().filter(|(_, entry)| entry.path == Path::Asking);
        self.posted = asking.any(|(qpn, entry)| entry.preference.is_some() || nic.has_posts(*qpn));
    }

    /// When [`LocalHost::check`] has something to do.
    #[inline]
    pub(in super::super) fn next_check(&self, channels: &Channels) -> Option<Nanos> {
        let asks = self.asking > 0 && self.posted;
        let any = asks || channels.askers.iter().flatten().any(|asker| !asker.ended && asker.has_requests());
        any.then(|| self.checked + CHECK)
    }
}
