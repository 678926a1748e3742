//! The guest: a kernel in QEMU whose root is the host's file system, read-only, and that runs what it is
//! asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use starverbs_conformance::process::{Process, tail};

use crate::kernel::Kernel;
use crate::net::{ADDRESSES, ADDRESSES_V6, Net, tap};

const GUEST: &str = include_str!("../guest.sh");
/// Booting takes about five seconds on an idle machine.
const BOOT: Duration = Duration::from_secs(180);
/// How long a guest that was told to end may take.
const END: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// What a guest is made of.
pub struct Machine<'a> {
    /// What it boots.
    pub kernel: &'a Kernel,
    /// QEMU: a program and its first arguments.
    pub qemu: &'a [String],
    /// Further arguments of it.
    pub devices: Vec<String>,
    /// Memory, in MiB.
    pub memory: u32,
    /// Further words for the kernel's command line.
    pub line: &'a str,
    /// What guest.sh runs before jobs are taken, in bash, with ADDRESS, ADDRESS6 and MTU set, and `eth0` up.
    pub setup: &'a str,
    /// IP MTU of its link.
    pub mtu: u32,
    /// It may reboot; else that, and what panics, is its end.
    pub reboots: bool,
    /// Which of the network's guests it is.
    pub number: usize,
}

/// Where a client finds its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// At a TCP port.
    Tcp(u16),
    /// At a port of the connection manager.
    Service(u16),
}

/// A running guest. Dropping it ends it, the hard way.
pub struct Guest {
    qemu: Process,
    console: PathBuf,
    share: PathBuf,
    tap: String,
    jobs: u32,
}

impl Guest {
    /// Boots and waits until the setup is done. `folder` takes what host and guest exchange.
    ///
    /// # Errors
    /// It does not come up: what its console says last.
    pub fn boot(machine: &Machine<'_>, net: &Net, folder: &Path) -> Result<Guest, String> {
        let share = folder.join("share");
        fs::create_dir_all(share.join("jobs")).map_err(|e| format!("{}: {e}", share.display()))?;
        let Machine { mtu, number, .. } = *machine;
        let (address, address6) = (ADDRESSES[number + 1], ADDRESSES_V6[number + 1]);
        let settings = format!("ADDRESS={address}\nADDRESS6={address6}\nMTU={mtu}\n");
        write(&share.join("settings"), &settings)?;
        write(&share.join("setup"), machine.setup)?;
        write(&share.join("guest.sh"), GUEST)?;
        let console = folder.join("console");
        let mut command = net.command(&machine.qemu[0]);
        command.args(&machine.qemu[1..]).args(arguments(machine, &share, &console));
        let qemu = Process::start(command, folder.join("qemu"))?;
        let mut guest = Guest { qemu, console, share, tap: tap(number), jobs: 0 };
        guest.await_ready()?;
        Ok(guest)
    }

    /// Waits until the guest has done its setup, as after a reboot.
    ///
    /// # Errors
    /// It does not come up: what its console says last.
    pub fn await_ready(&mut self) -> Result<(), String> {
        let file = self.share.join("ready");
        let deadline = Instant::now() + BOOT;
        while !file.exists() {
            if self.qemu.ended().is_some() || Instant::now() > deadline {
                let said = fs::read(&self.console).unwrap_or_default();
                return Err(format!(
                    "the guest does not come up:\n{}\n{}",
                    tail(&self.qemu.output()),
                    tail(&String::from_utf8_lossy(&said))
                ));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// What it and its kernel said on the console.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// A file that setup or a job has left in the folder that both see, /mnt/share there.
    pub fn shared(&self, name: &str) -> PathBuf {
        self.share.join(name)
    }

    /// The process that runs it.
    pub fn qemu(&mut self) -> &mut Process {
        &mut self.qemu
    }

    /// Frames that came from it and went to it so far.
    pub fn frames(&self) -> u64 {
        let devices = fs::read_to_string(format!("/proc/{}/net/dev", self.qemu.pid())).unwrap_or_default();
        let counts =
            devices.lines().find_map(|line| line.trim().strip_prefix(self.tap.as_str())?.strip_prefix(':'));
        let count = |place| counts?.split_ascii_whitespace().nth(place)?.parse::<u64>().ok();
        // The second of the eight figures of each way.
        count(1).unwrap_or(0) + count(9).unwrap_or(0)
    }

    /// Starts `words` in the guest; the job is told of as listening when it is `found` there.
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn start(&mut self, words: &[&str], found: Found) -> Result<Job, String> {
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let (line, mark) = (quoted.join(" "), self.jobs + 1);
        let listens = match found {
            Found::Tcp(port) => format!("grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"),
            Found::Service(port) => {
                format!("rdma resource show cm_id | grep -Eq 'state LISTEN .*:{port}( |$)'")
            }
        };
        self.script(&format!(
            "{line} &\nprogram=$!\n\
             until {listens} || ! kill -0 $program; do sleep 0.02; done 2>/dev/null\n\
             touch {mark}.listening\nwait $program\n"
        ))
    }

    /// Runs a script of bash in the guest.
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn script(&mut self, script: &str) -> Result<Job, String> {
        self.jobs += 1;
        let base = self.share.join("jobs").join(self.jobs.to_string());
        let fresh = base.with_extension("new");
        write(&fresh, script)?;
        fs::rename(&fresh, base.with_extension("run")).map_err(|e| format!("{}: {e}", fresh.display()))?;
        Ok(Job { base })
    }

    /// Lets the guest end, or ends it. What is dropped without this is ended the hard way.
    pub fn stop(&mut self) {
        let _ = fs::write(self.share.join("stop"), "");
        let _ = self.qemu.wait_until(Instant::now() + END);
        self.qemu.kill();
    }
}

/// QEMU's arguments: no device but those that are needed. Each path is a word of its own, whatever it holds.
fn arguments(machine: &Machine<'_>, share: &Path, console: &Path) -> Vec<String> {
    let plain = "-M q35 -smp 2 -nodefaults -no-user-config -display none -monitor none \
                 -device virtio-9p-pci,fsdev=r,mount_tag=hostroot \
                 -device virtio-9p-pci,fsdev=s,mount_tag=share";
    let mut words: Vec<String> = plain.split_ascii_whitespace().map(str::to_owned).collect();
    let line = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off net.ifnames=0 tsc=reliable \
                random.trust_cpu=on";
    let Machine { kernel, memory, number, .. } = machine;
    for (option, value) in [
        ("-m", memory.to_string()),
        ("-serial", format!("file:{}", console.display())),
        ("-kernel", kernel.image.display().to_string()),
        ("-initrd", kernel.initramfs.display().to_string()),
        ("-fsdev", "local,id=r,path=/,security_model=none,readonly=on,multidevs=remap".to_owned()),
        ("-fsdev", format!("local,id=s,path={},security_model=none", share.display())),
        ("-netdev", format!("tap,id=n,ifname={},script=no,downscript=no", tap(*number))),
        ("-device", format!("virtio-net-pci,netdev=n,mac=52:54:00:12:34:{:02x}", 0x56 + number)),
        ("-append", format!("{line} {}", machine.line)),
    ] {
        words.extend([option.to_owned(), value]);
    }
    if !machine.reboots {
        words.push("-no-reboot".to_owned());
    }
    words.extend(machine.devices.iter().cloned());
    words
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
}

/// A program in the guest. Dropping it kills it.
pub struct Job {
    base: PathBuf,
}

impl Job {
    /// The exit status, if it has ended.
    pub fn ended(&self) -> Option<i32> {
        fs::read_to_string(self.base.with_extension("status")).ok()?.trim().parse().ok()
    }

    /// Whether it is found where its client looks for it, or has ended.
    pub fn listens(&self) -> bool {
        self.base.with_extension("listening").exists()
    }

    /// All it wrote so far, errors last.
    pub fn output(&self) -> String {
        let read = |extension| fs::read(self.base.with_extension(extension)).unwrap_or_default();
        String::from_utf8_lossy(&[read("out"), read("err")].concat()).into_owned()
    }

    /// Asks for its end.
    pub fn kill(&self) {
        if self.ended().is_none() {
            let _ = fs::write(self.base.with_extension("kill"), "");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}
