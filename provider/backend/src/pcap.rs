//! Capture of the wire as this port sees it, for Wireshark: classic pcap of Ethernet frames.
//!
//! Owns the file. The Ethernet, IP and UDP headers are made up around the frame, except for what the ICRC
//! covers; it must never disturb the program: whatever goes wrong, capturing ends with one line on standard
//! error.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use starverbs_core::FrameMeta;
use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_settings::Settings;

use crate::quiet::{self, without_signals};

/// LINKTYPE_ETHERNET, see <https://www.tcpdump.org/linktypes.html>.
const ETHERNET: u32 = 1;
const SNAP: u32 = 65535;
const UDP: u8 = 17;

/// A capture file. `None`: it could not be written any more.
type CaptureFile = Mutex<Option<BufWriter<File>>>;

/// The captures that are open: process, path, file. A forked child has none of its parent's.
static OPEN: Mutex<Vec<(u32, PathBuf, Weak<CaptureFile>)>> = Mutex::new(Vec::new());

/// A capture that both halves of a port write to, and all ports of the process that are told the same file.
#[derive(Clone)]
pub(crate) struct Capture(Arc<CaptureFile>);

impl Capture {
    /// Begins the capture that the settings ask for. A file that cannot be made is no reason for the program
    /// to fail.
    pub(crate) fn open(settings: &Settings) -> Option<Capture> {
        let process = std::process::id();
        let path = settings.pcap_path(process)?;
        /* held by nobody for long, or by a thread that a fork left behind */
        let mut open = OPEN.try_lock().ok();
        if let Some(open) = &mut open {
            open.retain(|(of, _, file)| *of == process && file.strong_count() > 0);
            let known = open.iter().find(|(_, known, _)| *known == path);
            if let Some(file) = known.and_then(|(_, _, file)| file.upgrade()) {
                return Some(Capture(file));
            }
        }
        match without_signals(|| begin(&path)) {
            Ok(file) => {
                let file = Arc::new(Mutex::new(Some(file)));
                if let Some(open) = &mut open {
                    open.push((process, path, Arc::downgrade(&file)));
                }
                Some(Capture(file))
            }
            Err(error) => {
                warn(&format!("{}: {error}; no capture is made", path.display()));
                None
            }
        }
    }

    /// Adds a frame, in pieces from the BTH to behind the ICRC.
    pub(crate) fn frame(&self, outer: &IcrcHeader, meta: &FrameMeta, pieces: &[&[u8]]) {
        self.with(|file| write_frame(file, outer, meta, pieces));
    }

    /// Brings what was captured to the file.
    pub(crate) fn flush(&self) {
        self.with(BufWriter::flush);
    }

    fn with(&self, work: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = file.as_mut() else { return };
        if let Err(error) = without_signals(|| work(open)) {
            warn(&format!("{error}; the capture ends here"));
            // What is still in the buffer must not be tried again at drop.
            if let Some(broken) = file.take() {
                let _ = broken.into_parts();
            }
        }
    }
}

fn warn(what: &str) {
    quiet::write_line(format!("starverbs[{}]: STARVERBS_PCAP: {what}\n", std::process::id()).as_bytes());
}

fn begin(path: &Path) -> io::Result<BufWriter<File>> {
    let mut file = BufWriter::with_capacity(1 << 16, File::create(path)?);
    file.write_all(&0xa1b2_c3d4_u32.to_le_bytes())?;
    file.write_all(&[2, 0, 4, 0])?;
    file.write_all(&[0; 8])?;
    file.write_all(&SNAP.to_le_bytes())?;
    file.write_all(&ETHERNET.to_le_bytes())?;
    file.flush()?;
    Ok(file)
}

fn write_frame(
    file: &mut BufWriter<File>,
    outer: &IcrcHeader,
    meta: &FrameMeta,
    pieces: &[&[u8]],
) -> io::Result<()> {
    let payload: usize = pieces.iter().map(|p| p.len()).sum();
    let mut head = Vec::with_capacity(62);
    // Locally administered MAC addresses, ending as the IP addresses do.
    for gid in [&outer.dst, &outer.src] {
        head.extend([2, 0]);
        head.extend(&gid.0[12..]);
    }
    let hops = if meta.hop_limit == 0 { 64 } else { meta.hop_limit };
    match (outer.src.ipv4(), outer.dst.ipv4()) {
        (Some(src), Some(dst)) => {
            head.extend([0x08, 0x00]);
            head.extend(ipv4(src, dst, meta.traffic_class, hops, outer.ip_id, payload));
        }
        _ => {
            head.extend([0x86, 0xdd]);
            head.extend((0x6000_0000 | u32::from(meta.traffic_class) << 20).to_be_bytes());
            head.extend((payload as u16 + 8).to_be_bytes());
            head.extend([UDP, hops]);
            head.extend(outer.src.0);
            head.extend(outer.dst.0);
        }
    }
    head.extend(outer.sport.to_be_bytes());
    head.extend(outer.dport.to_be_bytes());
    head.extend((payload as u16 + 8).to_be_bytes());
    head.extend([0, 0]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let len = (head.len() + payload) as u32;
    for number in [now.as_secs() as u32, now.subsec_micros(), len, len] {
        file.write_all(&number.to_le_bytes())?;
    }
    file.write_all(&head)?;
    pieces.iter().try_for_each(|piece| file.write_all(piece))
}

fn ipv4(src: [u8; 4], dst: [u8; 4], tos: u8, ttl: u8, id: u16, payload: usize) -> [u8; 20] {
    let mut ip = [0; 20];
    ip[0] = 0x45;
    ip[1] = tos;
    ip[2..4].copy_from_slice(&(payload as u16 + 28).to_be_bytes());
    ip[4..6].copy_from_slice(&id.to_be_bytes());
    ip[6] = 0x40;
    ip[8] = ttl;
    ip[9] = UDP;
    ip[12..16].copy_from_slice(&src);
    ip[16..20].copy_from_slice(&dst);
    let sum: u32 = ip.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!(sum as u16).wrapping_add((sum >> 16) as u16)).to_be_bytes());
    ip
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_header_sums_to_all_ones() {
        let ip = ipv4([192, 0, 2, 1], [198, 51, 100, 254], 3, 64, 0xfffe, 4112);
        let mut sum: u32 = ip.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        assert_eq!(sum, 0xffff);
    }

    #[test]
    fn a_full_disk_ends_the_capture_and_nothing_else() {
        let settings = Settings { pcap: Some("/dev/full".into()), ..Settings::default() };
        assert!(Capture::open(&settings).is_none());
        let settings = Settings { pcap: Some("/nonexistent/x.pcap".into()), ..Settings::default() };
        assert!(Capture::open(&settings).is_none());
    }
}
