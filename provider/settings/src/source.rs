//! Where values come from, and which wins: the environment, then one TOML file, then the defaults.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{SettingOrigin, SettingsError};
use crate::star::is_open;
use crate::{KEYS, Key, Settings, StarKey, value};

const PREFIX: &str = "STARVERBS_";
const SYSTEM_FILE: &str = "/etc/starverbs.toml";

/// Contents of a file.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) toml: String,
    /// Others than its owner may read or change it
    pub(crate) open: bool,
}

/// Reads a file; `None` when it does not exist.
pub(crate) fn read_file(path: &Path) -> io::Result<Option<Text>> {
    let read = || {
        let mut file = File::open(path)?;
        let (open, mut toml) = (is_open(file.metadata()?.mode()), String::new());
        file.read_to_string(&mut toml)?;
        Ok(Text { toml, open })
    };
    match read() {
        Ok(text) => Ok(Some(text)),
        Err(e) if io::Error::kind(&e) == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// The settings of a process with this environment; `read` stands for the file system.
pub(crate) fn load(
    env: impl Iterator<Item = (OsString, OsString)>,
    read: impl Fn(&Path) -> io::Result<Option<Text>>,
) -> Result<Settings, SettingsError> {
    let mut ours = Vec::new();
    let mut home = None;
    for (name, value) in env {
        match name.into_string() {
            Ok(name) if name.starts_with(PREFIX) => match value.into_string() {
                Ok(value) => ours.push((name, value)),
                Err(_) => return Err(SettingsError::NotText { key: name }),
            },
            Ok(name) if name == "HOME" => home = Some(PathBuf::from(value)),
            _ => {}
        }
    }
    let named = ours.iter().find(|(name, value)| name == "STARVERBS_CONFIG" && !value.is_empty());
    let file = match named {
        Some((_, path)) => Some(named_file(Path::new(path), &read)?),
        None => default_file(home, &read)?,
    };
    merge(ours.into_iter(), file)
}

fn named_file(
    path: &Path,
    read: &impl Fn(&Path) -> io::Result<Option<Text>>,
) -> Result<(PathBuf, Text), SettingsError> {
    let unreadable = |reason| SettingsError::Unreadable { file: path.to_owned(), reason };
    match read(path).map_err(unreadable)? {
        Some(text) => Ok((path.to_owned(), text)),
        None => Err(unreadable(io::Error::new(io::ErrorKind::NotFound, "STARVERBS_CONFIG names no file"))),
    }
}

fn default_file(
    home: Option<PathBuf>,
    read: &impl Fn(&Path) -> io::Result<Option<Text>>,
) -> Result<Option<(PathBuf, Text)>, SettingsError> {
    let personal = home.map(|home| home.join(".config/starverbs/starverbs.toml"));
    for path in personal.into_iter().chain([PathBuf::from(SYSTEM_FILE)]) {
        match read(&path) {
            Ok(Some(text)) => return Ok(Some((path, text))),
            Ok(None) => {}
            // A home directory that this user may not look into holds no settings for this user.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            Err(reason) => return Err(SettingsError::Unreadable { file: path, reason }),
        }
    }
    Ok(None)
}

/// Lays `env` over the text of `file` over the defaults.
pub(crate) fn merge(
    env: impl Iterator<Item = (String, String)>,
    file: Option<(PathBuf, Text)>,
) -> Result<Settings, SettingsError> {
    let mut settings = Settings::default();
    if let Some((path, text)) = file {
        let table: toml::Table = text.toml.parse().map_err(|e| SettingsError::Syntax {
            file: path.clone(),
            reason: parser_message(&text.toml, &e),
        })?;
        let origin = SettingOrigin::File(path.clone());
        for (name, value) in &table {
            let key = find(name.as_str(), &origin, |key| key.toml_name() == *name)?;
            if key.name == "CONFIG" {
                return Err(SettingsError::EnvironmentOnly { key: origin.spell(key.name) });
            }
            apply(&mut settings, key, &origin, &value::from_toml(value))?;
        }
        if text.open && matches!(settings.star_key, Some(StarKey::Given(_))) {
            let reason = "it holds star_key, and others than its owner may read or change it (chmod 600)";
            let reason = io::Error::new(io::ErrorKind::PermissionDenied, reason);
            return Err(SettingsError::Unreadable { file: path, reason });
        }
        settings.config = Some(path);
    }
    for (name, value) in env {
        let Some(bare) = name.strip_prefix(PREFIX) else { continue };
        let key = find(bare, &SettingOrigin::Environment, |key| key.name == bare)?;
        // As with most programs, `STARVERBS_X=` is how a shell takes a setting away for one command.
        if !value.is_empty() {
            apply(&mut settings, key, &SettingOrigin::Environment, &value)?;
        }
    }
    Ok(settings)
}

/// The parser's message about a text. It shows the line, which may hold a key: beside one the line is only
/// numbered.
fn parser_message(text: &str, error: &toml::de::Error) -> String {
    if !text.to_ascii_lowercase().contains("key") {
        return error.to_string().trim_end().to_owned();
    }
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => format!("line {}: {}", before.matches('\n').count() + 1, error.message()),
        None => error.message().to_owned(),
    }
}

fn find(
    name: &str,
    origin: &SettingOrigin,
    is: impl Fn(&Key) -> bool,
) -> Result<&'static Key, SettingsError> {
    KEYS.iter().find(|key| is(key)).ok_or_else(|| SettingsError::Unknown {
        key: match origin {
            SettingOrigin::Environment => format!("{PREFIX}{name}"),
            SettingOrigin::File(path) => format!("{name} (in {})", path.display()),
        },
        nearest: nearest(name).map(|key| match origin {
            SettingOrigin::Environment => key.variable(),
            SettingOrigin::File(_) => key.toml_name(),
        }),
    })
}

fn apply(
    settings: &mut Settings,
    key: &Key,
    origin: &SettingOrigin,
    given: &str,
) -> Result<(), SettingsError> {
    (key.set)(settings, given.trim()).map_err(|reason| SettingsError::Value {
        key: origin.spell(key.name),
        given: if key.is_secret() { "...".to_owned() } else { given.to_owned() },
        reason,
        allowed: key.allowed,
    })
}

/// The key whose name is fewest edits away, if that is close enough to be a slip of the hand.
fn nearest(name: &str) -> Option<&'static Key> {
    let name = name.to_ascii_uppercase();
    let (distance, key) = KEYS.iter().map(|key| (edits(key.name, &name), key)).min_by_key(|(d, _)| *d)?;
    (distance <= 1 + name.len() / 4).then_some(key)
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
