//! Which CPU the driver, the application and the device run on: chosen by the user, or as far apart
//! as the machine allows.

use crate::args::{ConsumerArg, CpusArg};
use netmem_measure::arguments::BadArgument;
use netmem_measure::cpus::check;

/// The CPUs of the driver, the application and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) net: usize,
    pub(crate) app: usize,
    pub(crate) device: usize,
}

impl Placement {
    /// Places the roles that the user did not place. Each role gets a CPU of its own if there are
    /// enough. Otherwise application and device share one, and the driver stays alone as long as
    /// possible.
    pub(crate) fn new(
        asked: CpusArg,
        consumer: Option<ConsumerArg>,
        online: &[usize],
        allowed: &[usize],
    ) -> Result<Self, BadArgument> {
        for (what, cpu) in [("--cpus net", asked.net), ("--cpus app", asked.app), ("--cpus device", asked.device)] {
            cpu.map_or(Ok(()), |cpu| check(what, cpu, online, allowed))?;
        }
        let mut app = asked.app;
        if let Some(ConsumerArg::Cpu(cpu)) = consumer {
            check("--consumer", cpu, online, allowed)?;
            if app.is_some_and(|app| app != cpu) {
                return BadArgument::new("--consumer and --cpus app name different CPUs; give one of them");
            }
            app = Some(cpu);
        }
        let mut taken: Vec<usize> = [asked.net, asked.device, app].into_iter().flatten().collect();
        let mut place = |cpu: Option<usize>, mut free: Box<dyn Iterator<Item = &usize> + '_>, join: usize| {
            let cpu = cpu.unwrap_or_else(|| free.find(|cpu| !taken.contains(cpu)).copied().unwrap_or(join));
            taken.push(cpu);
            cpu
        };
        let other_than = |cpu| allowed.iter().copied().find(|&c| Some(c) != cpu).unwrap_or(allowed[0]);
        // The first CPU often serves the machine's interrupts, so the driver does not use it.
        let net = place(asked.net, Box::new(allowed.iter().rev()), other_than(asked.device));
        let next_to_app = app.filter(|&app| app != net).unwrap_or_else(|| other_than(Some(net)));
        let device = place(asked.device, Box::new(allowed.iter()), next_to_app);
        let app = place(app, Box::new(allowed.iter()), device);
        Ok(Self { net, app, device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(asked: &str, consumer: Option<ConsumerArg>, cpus: &[usize]) -> Result<(usize, usize, usize), String> {
        let placed = Placement::new(asked.parse()?, consumer, &[0, 1, 2, 3], cpus);
        placed.map(|p| (p.net, p.app, p.device)).map_err(|e| e.to_string())
    }

    #[test]
    fn roles_share_only_where_they_must() {
        assert_eq!(place("", None, &[0]), Ok((0, 0, 0)));
        assert_eq!(place("", None, &[0, 1]), Ok((1, 0, 0)));
        assert_eq!(place("", None, &[0, 1, 2]), Ok((2, 1, 0)));
        assert_eq!(place("net=0", None, &[0, 1]), Ok((0, 1, 1)));
        assert_eq!(place("net=0,device=0", None, &[0, 1]), Ok((0, 1, 0)));
        assert_eq!(place("", Some(ConsumerArg::Cpu(1)), &[0, 1]), Ok((0, 1, 1)));
        assert_eq!(place("device=0", Some(ConsumerArg::Cpu(1)), &[0, 1]), Ok((1, 1, 0)));
        assert_eq!(place("app=3", None, &[0, 1, 2, 3]), Ok((2, 3, 0)));
    }

    #[test]
    fn cpus_that_are_not_ours_are_named() {
        let missing = place("net=9", None, &[0]).unwrap_err();
        assert!(missing.contains("CPU 9 does not exist") && missing.contains("0-3"), "{missing}");
        let masked = place("", Some(ConsumerArg::Cpu(2)), &[0, 1]).unwrap_err();
        assert!(masked.contains("CPU 2") && masked.contains("0-1"), "{masked}");
        assert!(place("app=1", Some(ConsumerArg::Cpu(0)), &[0, 1]).is_err());
    }
}
