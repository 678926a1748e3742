//! Whether the peer's queue pair speaks the dialect: asked before the first RPC, as a card that does not know
//! it drops the op-codes without an answer.

use super::rpc::Agreed;
use super::{Ctx, TimerAction};
use crate::env::Env;
use crate::strom::Dialect;
use crate::types::{AsyncEvent, Av, FrameMeta, Nanos, Psn, Qpn, SendOp, SendWqe, WcStatus};
use crate::wire::PKEY_DEFAULT;
use crate::wire::builder::HeaderBuf;
use crate::wire::opcode::code;
use crate::wire::packet::Packet;

/// The peer is asked so often.
const TRIES: u8 = 8;
/// After the first try without an answer the next one comes so much later, ns, and then twice that.
const ASK_AGAIN: Nanos = 1_000_000;
/// Bit of a message's word: it is an answer.
const ANSWER: u32 = 1 << 8;

fn word(answer: bool, dialect: Dialect) -> u32 {
    (dialect as u32 | if answer { ANSWER } else { 0 }).to_be()
}

/// Sends a message about QP `from` to QP `to`.
fn send<E: Env>(env: &mut E, av: &Av, from: Qpn, to: Qpn, word: u32) {
    let header = HeaderBuf::bth(code::DIALECT, to, Psn::default(), false, false, 0, PKEY_DEFAULT);
    env.send_frame(av, &header.deth(0, from).imm(word), &[], 0, false);
}

impl<E: Env> Ctx<'_, E> {
    /// The dialect of the QP.
    pub(crate) fn dialect(&self) -> Dialect {
        if self.qp.rpc.is_some() { Dialect::Strom } else { Dialect::Plain }
    }

    /// Whether an RPC may begin: not where the QP or its peer does not speak the dialect, nor with more
    /// parameters than a packet carries.
    pub(super) fn admit_rpc(&self, wqe: &SendWqe) -> Result<(), WcStatus> {
        if wqe.op == SendOp::Rpc && wqe.length > self.qp.mtu {
            return Err(WcStatus::LocLenErr);
        }
        match &self.qp.rpc {
            Some(rpc) if rpc.agreed != Agreed::No => Ok(()),
            _ => Err(WcStatus::LocQpOpErr),
        }
    }

    /// An RPC is next: whether it must wait for what the peer says. Asks it if that is due.
    pub(super) fn awaits_agreement(&mut self) -> bool {
        let now = self.now;
        let Some(rpc) = &mut self.qp.rpc else { return false };
        let Agreed::Asked(tries) = rpc.agreed else { return false };
        if now >= rpc.ask_at && tries < TRIES {
            rpc.agreed = Agreed::Asked(tries + 1);
            rpc.ask_at = now + (ASK_AGAIN << tries);
            let word = word(false, Dialect::Strom);
            send(self.env, &self.qp.attr.av, self.qp.qpn, self.qp.attr.dest_qpn, word);
        }
        let at = self.qp.rpc.as_ref().map_or(now, |rpc| rpc.ask_at);
        self.qp.flags.due = TimerAction::Rpc;
        self.arm(at);
        true
    }

    /// The QP's timer: the peer was asked often enough, or is to be asked again.
    pub(super) fn agreement_turn(&mut self) {
        let Some(rpc) = &self.qp.rpc else { return };
        match rpc.agreed {
            Agreed::Asked(TRIES) if self.now >= rpc.ask_at => self.set_agreed(false),
            Agreed::Asked(1..) => self.ready(),
            _ => {}
        }
    }

    fn set_agreed(&mut self, agreed: bool) {
        let Some(rpc) = &mut self.qp.rpc else { return };
        if !matches!(rpc.agreed, Agreed::Asked(_)) {
            return;
        }
        rpc.agreed = if agreed { Agreed::Yes } else { Agreed::No };
        if !agreed {
            self.env.event(AsyncEvent::PeerLacksDialect(self.qp.qpn));
        }
        self.ready();
    }

    /// A message about the peer's QP.
    pub(crate) fn receive_dialect(&mut self, meta: &FrameMeta, packet: &Packet<'_>) {
        let (Some(from), Some(word_in)) = (packet.deth().map(|deth| deth.src_qp()), packet.imm()) else {
            return self.sh.stats.drop_malformed.inc();
        };
        let word_in = u32::from_be(word_in);
        if word_in & ANSWER == 0 {
            if self.env.can_send() {
                let av = Av { dgid: meta.src, sgid: meta.dst, hop_limit: 64, ..Av::default() };
                send(self.env, &av, self.qp.qpn, from, word(true, self.dialect()));
            }
            return;
        }
        let asked = self.qp.rpc.as_ref().is_some_and(|rpc| matches!(rpc.agreed, Agreed::Asked(1..)));
        if !asked || from != self.qp.attr.dest_qpn || meta.src != self.qp.attr.av.dgid {
            return self.sh.stats.drop_stale_response.inc();
        }
        self.set_agreed(word_in & 0xff == Dialect::Strom as u32);
    }
}
