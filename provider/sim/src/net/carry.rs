//! What becomes of a frame on its way.

use std::cmp::Reverse;

use starverbs_core::wire::{IcrcHeader, icrc};
use starverbs_core::{Av, FrameMeta, Nanos};

use super::{Faults, Flight, Net};
use crate::host::SimHost;

impl Net {
    /// A frame leaves `from`: for the host with that address or, multicast, for each that has joined the
    /// group, the sender among them.
    pub(super) fn launch(&mut self, from: usize, to: &Av, bytes: Vec<u8>) {
        self.tally.sent += 1;
        if let Some(tap) = &mut self.tap {
            tap(from, &bytes);
        }
        let reached = |h: &SimHost| h.gid == to.dgid || h.groups.contains(&to.dgid);
        let mut before = None;
        for dest in 0..self.hosts.len() {
            if reached(&self.hosts[dest])
                && let Some(dest) = before.replace(dest)
            {
                self.carry(from, dest, to, bytes.clone(), None);
            }
        }
        match before {
            Some(last) => self.carry(from, last, to, bytes, None),
            None => self.tally.stray += 1,
        }
    }

    /// What the wire does to a frame on its way to one host.
    pub(super) fn carry(
        &mut self,
        from: usize,
        dest: usize,
        to: &Av,
        mut bytes: Vec<u8>,
        star: Option<IcrcHeader>,
    ) {
        let link = self.link(from, dest);
        if self.cuts[link] > self.now || star.is_some() && self.star_cut.contains(&from) {
            self.trace_any(from, "cut", &bytes, star.as_ref());
            self.tally.cut += 1;
            return;
        }
        let faults = self.links[link].unwrap_or(self.faults);
        if self.rng.chance(faults.loss) {
            self.trace_any(from, "lost", &bytes, star.as_ref());
            self.tally.lost += 1;
            return;
        }
        if self.rng.chance(faults.corrupt) && self.corrupt(to, &mut bytes, star.as_ref()) {
            self.trace_any(from, "corrupted", &bytes, star.as_ref());
            self.tally.corrupted += 1;
            return;
        }
        let meta = FrameMeta {
            src: to.sgid,
            dst: to.dgid,
            traffic_class: to.traffic_class,
            hop_limit: to.hop_limit,
        };
        let mut copies = 1;
        if self.rng.chance(faults.duplicate) {
            self.tally.duplicated += 1;
            copies = 2;
        }
        let queue = (faults.service > 0).then_some((faults.service, faults.queue));
        let mut first = None;
        for _ in 0..copies {
            /* a copy that the network makes is not late: StaR would write it (docs/star.md) */
            let together = first.filter(|_| star.is_some());
            let at = together.unwrap_or_else(|| self.arrival(from, dest, &faults));
            first = Some(at);
            self.trace_any(from, "sent", &bytes, star.as_ref());
            let bytes = if copies > 1 { bytes.clone() } else { std::mem::take(&mut bytes) };
            self.put(at, Flight { from, to: dest, meta, bytes, star, queue });
        }
    }

    /// A frame arrives at a time.
    pub(super) fn put(&mut self, at: Nanos, flight: Flight) {
        self.order += 1;
        self.wire.push(Reverse((at, self.order)));
        self.flights.insert(self.order, flight);
    }

    /// A frame that arrives at a host that takes time over each waits there from now on, or is lost for want
    /// of room. False: it has waited, or need not.
    pub(super) fn arrived(&mut self, at: Nanos, order: u64) -> bool {
        let Some(flight) = self.flights.get_mut(&order) else { return false };
        let Some((service, most)) = flight.queue.take() else { return false };
        let busy = &mut self.busy[flight.to];
        if busy.saturating_sub(at) / service < most {
            *busy = at.max(*busy) + service;
            self.wire.push(Reverse((*busy, order)));
        } else if let Some(flight) = self.flights.remove(&order) {
            self.trace_any(flight.to, "overran", &flight.bytes, flight.star.as_ref());
            self.tally.overrun += 1;
        }
        true
    }

    fn arrival(&mut self, from: usize, dest: usize, faults: &Faults) -> Nanos {
        let straight = self.now + faults.delay + self.rng.below(faults.jitter + 1);
        if self.rng.chance(faults.reorder) {
            self.tally.reordered += 1;
            return straight + self.rng.below(faults.late + 1);
        }
        let link = self.link(from, dest);
        let lane = &mut self.lanes[link];
        *lane = straight.max(*lane);
        *lane
    }

    /// Flips a bit; whether the ICRC notices.
    fn corrupt(&mut self, to: &Av, bytes: &mut [u8], star: Option<&IcrcHeader>) -> bool {
        if let Some(path) = star {
            return self.corrupt_star(path, bytes);
        }
        let hdr = IcrcHeader { src: to.sgid, dst: to.dgid, sport: 0xc000, dport: 4791, ip_id: 0 };
        let before = icrc::of_frame(&hdr, bytes);
        let bit = self.rng.below(bytes.len() as u64 * 8) as usize;
        bytes[bit / 8] ^= 1 << (bit % 8);
        icrc::of_frame(&hdr, bytes) != before
    }
}

#[cfg(test)]
mod tests {
    use starverbs_core::NicConfig;

    use super::*;

    /// Frames on a long way are in nobody's queue: those of a short way find the room that there is when they
    /// come.
    #[test]
    fn a_frame_takes_its_place_in_a_queue_when_it_arrives() {
        let slow = Faults { delay: 5_000_000, service: 10_000, queue: 2, ..Faults::default() };
        let mut net = Net::new(3, NicConfig::default(), slow, 1);
        net.set_link(1, 2, Faults { delay: 50_000, ..slow });
        let to = |net: &Net, from: usize| Av {
            sgid: net.hosts[from].gid,
            dgid: net.hosts[2].gid,
            ..Av::default()
        };
        let (far, near) = (to(&net, 0), to(&net, 1));
        for _ in 0..4 {
            net.carry(0, 2, &far, vec![0; 64], None);
        }
        net.carry(1, 2, &near, vec![0; 64], None);
        while net.in_flight() > 4 && net.step() {}
        assert_eq!((net.tally.delivered, net.tally.overrun), (1, 0), "nothing waits there yet");
        assert_eq!(net.now(), 1_000 + 50_000 + 10_000);
        assert!(net.run_until_idle(100));
        assert_eq!((net.tally.delivered, net.tally.overrun), (3, 2), "four came at once");
    }
}
