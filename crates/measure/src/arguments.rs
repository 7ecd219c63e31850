//! Arguments of the command line: an error for those whose meaning is wrong, and times.

use std::time::Duration;

/// An argument whose syntax is right and whose meaning is not. The text names what was asked for,
/// what was found, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadArgument(pub String);

impl BadArgument {
    /// An error with this text, as the result of a check.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn new<T>(why: impl Into<String>) -> Result<T, Self> {
        Err(Self(why.into()))
    }
}

/// Parses a time: seconds, or with a suffix (`0.3`, `300ms`, `2s`), from 1 ms to a day.
///
/// # Errors
///
/// The text is no such time; the error names the reason.
pub fn duration(s: &str) -> Result<Duration, String> {
    let (number, unit) = match s.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => s.split_at(at),
        None => (s, "s"),
    };
    let scale = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        _ => return Err(format!("unknown suffix `{unit}`; there are s (the default) and ms")),
    };
    let seconds = number.parse::<f64>().map_err(|_| format!("`{number}` is not a number"))? * scale;
    if !(0.001..=86400.0).contains(&seconds) {
        return Err("between 1 ms and 86400 s are possible".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration("0.3"), Ok(Duration::from_millis(300)));
        assert_eq!(duration("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        for bad in ["", "x", "1m", "0", "-1", "1e9", "nan", "inf"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
