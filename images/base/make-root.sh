#!/bin/sh
# Makes root.tar in the directory DIR: the root file system of Debian 12, with its security updates, and
# as little of documentation and translations as debian:bookworm-slim has. Needs root and debootstrap.
# usage: make-root.sh DIR [MIRROR]
set -eu
suite=bookworm
directory=$1
mirror=${2:-http://deb.debian.org/debian}
root=$directory/root

debootstrap --variant=minbase "$suite" "$root" "$mirror"
cat > "$root/etc/apt/sources.list" <<END
deb $mirror $suite main
deb $mirror $suite-updates main
deb $mirror-security $suite-security main
END
# Translations and lists are not wanted, also not those of packages that an image adds to this base.
cat > "$root/etc/apt/apt.conf.d/container" <<END
Acquire::Languages "none";
APT::Install-Recommends "false";
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
END
cat > "$root/etc/dpkg/dpkg.cfg.d/container" <<END
force-unsafe-io
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
path-include /usr/share/man/man1
END
# A package's scripts must start no service.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
chroot "$root" apt-get update -qq
DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get upgrade -y -qq
chroot "$root" apt-get clean

find "$root/usr/share/doc" -type f ! -name copyright -delete
find "$root/usr/share/doc" -type l -delete
find "$root/usr/share/doc" -type d -empty -delete
rm -rf "$root"/usr/share/info/* "$root"/usr/share/locale/* "$root"/usr/share/man/*/*
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/*
rm -rf "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old "$root"/dev/* "$root"/run/*
# These are the machine's; an engine brings its own.
rm -f "$root/etc/resolv.conf" "$root/etc/hostname"
tar --create --file "$directory/root.tar" --numeric-owner --sort=name --one-file-system -C "$root" .
rm -rf "$root"
