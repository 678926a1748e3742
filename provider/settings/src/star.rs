//! StaR: what a program wants its connections to be, and the key under which two cards settle it.

use std::fmt;
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use zeroize::Zeroizing;

use crate::SettingsError;

/// Default role of ends of RC connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StarPreference {
    /// Plain RoCEv2.
    #[default]
    Off,
    /// What suits both ends.
    Auto,
    /// Stateless: the peer's card keeps the connection.
    Stateless,
    /// Stateful: this card keeps the connection.
    Stateful,
}

pub(crate) const PREFERENCES: [(&str, StarPreference); 4] = [
    ("off", StarPreference::Off),
    ("auto", StarPreference::Auto),
    ("stateless", StarPreference::Stateless),
    ("stateful", StarPreference::Stateful),
];

/// Which packets StaR sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StarWire {
    /// Few: many WQEs in one, and one answer to many.
    #[default]
    Packed,
    /// The paper's seven types, one by one.
    Paper,
}

pub(crate) const WIRES: [(&str, StarWire); 2] = [("packed", StarWire::Packed), ("paper", StarWire::Paper)];

/// Bytes of a key.
const KEY: usize = 32;
/// A file longer than this holds something else.
const LONGEST: u64 = 4096;

/// Where the key is. It is wiped from memory when this goes, and no `Debug` or `Display` shows it.
#[derive(Clone, PartialEq, Eq)]
pub enum StarKey {
    /// The setting itself.
    Given(Zeroizing<[u8; KEY]>),
    /// A file that nobody but its owner may read: 64 hexadecimal digits, or 32 bytes.
    File(PathBuf),
}

impl StarKey {
    /// Parses 64 hexadecimal digits, or a path, which has a slash. The file is not looked at.
    ///
    /// # Errors
    /// A sentence with the reason why it is neither.
    pub(crate) fn parse(text: &str) -> Result<Option<StarKey>, String> {
        if text == "none" {
            return Ok(None);
        }
        if text.contains('/') {
            return Ok(Some(StarKey::File(text.into())));
        }
        match digits(text.as_bytes()) {
            Some(key) => Ok(Some(StarKey::Given(key))),
            None => Err("neither 64 hexadecimal digits nor a path with a slash".to_owned()),
        }
    }

    /// The key.
    ///
    /// # Errors
    /// [`SettingsError::Unreadable`]: the file cannot be read or is none, others than its owner may read or
    /// change it, that owner is neither this process's user nor root, or it holds no key.
    pub fn load(&self) -> Result<Zeroizing<[u8; KEY]>, SettingsError> {
        match self {
            StarKey::Given(key) => Ok(key.clone()),
            StarKey::File(file) => {
                read(file).map_err(|reason| SettingsError::Unreadable { file: file.clone(), reason })
            }
        }
    }
}

impl fmt::Debug for StarKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StarKey({self})")
    }
}

impl fmt::Display for StarKey {
    /// The path; of a key itself only that there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StarKey::Given(_) => f.write_str("hidden"),
            StarKey::File(path) => write!(f, "{}", path.display()),
        }
    }
}

fn read(path: &Path) -> Result<Zeroizing<[u8; KEY]>, Error> {
    /* a pipe that nobody writes to would be waited for; std opens with O_CLOEXEC */
    let file = std::fs::OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let refused = if is_open(about.mode()) {
        Some("others than its owner may read or change it (chmod 600)")
    } else if ![0, nix::unistd::geteuid().as_raw()].contains(&about.uid()) {
        Some("it belongs to somebody else (chown)")
    } else {
        None
    };
    if let Some(reason) = refused {
        return Err(Error::new(ErrorKind::PermissionDenied, reason));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(LONGEST as usize));
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let key = match <[u8; KEY]>::try_from(bytes.as_slice()) {
        Ok(raw) => Some(Zeroizing::new(raw)),
        Err(_) => digits(bytes.trim_ascii_end()),
    };
    key.ok_or_else(|| Error::new(ErrorKind::InvalidData, "neither 64 hexadecimal digits nor 32 bytes"))
}

/// Whether a file of this mode is open to others than its owner.
pub(crate) fn is_open(mode: u32) -> bool {
    mode & 0o077 != 0
}

/// 64 hexadecimal digits.
fn digits(text: &[u8]) -> Option<Zeroizing<[u8; KEY]>> {
    let mut key = Zeroizing::new([0; KEY]);
    let (pairs, rest) = text.as_chunks::<2>();
    if pairs.len() != KEY || !rest.is_empty() {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        *byte = (high? << 4 | low?) as u8;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1D1E1F";

    fn counted() -> [u8; KEY] {
        std::array::from_fn(|at| at as u8)
    }

    #[test]
    fn a_key_is_digits_or_a_path_and_never_shown() {
        let key = StarKey::parse(HEX).unwrap().unwrap();
        assert_eq!(*key.load().unwrap(), counted());
        assert_eq!(
            (format!("{key}"), format!("{key:?}")),
            ("hidden".to_owned(), "StarKey(hidden)".to_owned())
        );
        assert_eq!(StarKey::parse("./key"), Ok(Some(StarKey::File("./key".into()))));
        assert_eq!(StarKey::parse("none"), Ok(None));
        for bad in [&HEX[1..], &format!("{HEX}00"), &HEX.replace('a', "g"), "key", ""] {
            assert!(StarKey::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_is_the_owners_alone() {
        let file = std::env::temp_dir().join(format!("starverbs-key-{}", std::process::id()));
        let key = StarKey::parse(file.to_str().unwrap()).unwrap().unwrap();
        let with = |bytes: &[u8], mode| {
            std::fs::write(&file, bytes).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            let loaded = key.load().map(|key| *key).map_err(|error| error.to_string());
            std::fs::remove_file(&file).unwrap();
            loaded
        };
        assert_eq!(with(format!("{HEX}\n").as_bytes(), 0o600), Ok(counted()));
        assert_eq!(with(&counted(), 0o400), Ok(counted()));
        for mode in [0o640, 0o604, 0o620, 0o602] {
            assert!(with(&counted(), mode).unwrap_err().contains("chmod 600"), "{mode:o}");
        }
        assert!(with(&counted()[1..], 0o600).unwrap_err().contains("32 bytes"));
        assert!(matches!(key.load(), Err(SettingsError::Unreadable { .. })), "there is none");
        let no_file = StarKey::File(std::env::temp_dir()).load().unwrap_err().to_string();
        assert!(no_file.contains("not a regular file"), "{no_file}");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
        let pipe = key.load().unwrap_err().to_string();
        std::fs::remove_file(&file).unwrap();
        assert!(pipe.contains("not a regular file"), "{pipe}");
        if nix::unistd::geteuid().is_root() {
            std::fs::write(&file, counted()).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&file, Some(12345), None).unwrap();
            let others = key.load().unwrap_err().to_string();
            std::fs::remove_file(&file).unwrap();
            assert!(others.contains("somebody else"), "{others}");
        }
    }
}
