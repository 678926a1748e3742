//! Queue pairs as a table for people: what `starverbs stat --qp` shows.

use std::fmt::Write as _;

use starverbs_core::Qpn;
use starverbs_core::qp::QpAttr;
use starverbs_core::types::QPN_MASK;

use crate::host;

/// A line with the columns' names, then a line each.
#[derive(Debug)]
pub struct QpList(String);

/// What is known of a queue pair's connection beside its attributes.
#[derive(Clone, Copy, Debug)]
pub struct QpCarrier {
    /// Its role in StaR; "-": none
    pub star: &'static str,
    /// What carries it
    pub link: &'static str,
    /// Requests that were sent and executed there, which its PSNs do not count
    pub counted: [u32; 2],
}

impl QpCarrier {
    /// Packets, and nothing else.
    pub const WIRE: QpCarrier = QpCarrier { star: "-", link: "wire", counted: [0; 2] };
}

impl Default for QpList {
    fn default() -> Self {
        QpList(String::from("qpn state remote_qpn remote_gid path_mtu sq_psn rq_psn star link\n"))
    }
}

impl QpList {
    /// One more.
    pub fn add(&mut self, qpn: Qpn, attr: &QpAttr, carrier: &QpCarrier) {
        let QpCarrier { star, link, counted: [sent, executed] } = carrier;
        let (remote, gid, mtu) = (attr.dest_qpn, host::ip_of(attr.av.dgid), attr.path_mtu.bytes());
        let sq = attr.sq_psn.get().wrapping_add(*sent) & QPN_MASK;
        let rq = attr.rq_psn.get().wrapping_add(*executed) & QPN_MASK;
        /* writing to a String cannot fail */
        let _ = writeln!(self.0, "{qpn:#x} {:?} {remote:#x} {gid} {mtu} {sq} {rq} {star} {link}", attr.state);
    }

    /// The table.
    pub fn text(&self) -> &str {
        &self.0
    }
}
