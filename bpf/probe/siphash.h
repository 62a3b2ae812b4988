/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * SipHash-2-4 (Aumasson and Bernstein, 2012) over a number of 64-bit words that is known when it is compiled: no loop,
 * no branch, no memory but the state.
 */
#ifndef SWERVE_PROBE_SIPHASH_H
#define SWERVE_PROBE_SIPHASH_H

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define SIP_LITTLE(word) __builtin_bswap64(word)
#else
#define SIP_LITTLE(word) (word)
#endif

struct siphash {
	u64 v0;
	u64 v1;
	u64 v2;
	u64 v3;
};

static __always_inline u64 sip_rotated(u64 word, u32 bits)
{
	return word << bits | word >> (64 - bits);
}

static __always_inline void sip_round(struct siphash *hash)
{
	hash->v0 += hash->v1;
	hash->v1 = sip_rotated(hash->v1, 13) ^ hash->v0;
	hash->v0 = sip_rotated(hash->v0, 32);
	hash->v2 += hash->v3;
	hash->v3 = sip_rotated(hash->v3, 16) ^ hash->v2;
	hash->v0 += hash->v3;
	hash->v3 = sip_rotated(hash->v3, 21) ^ hash->v0;
	hash->v2 += hash->v1;
	hash->v1 = sip_rotated(hash->v1, 17) ^ hash->v2;
	hash->v2 = sip_rotated(hash->v2, 32);
}

/* `key`: its two halves, each read as a little-endian number. */
static __always_inline void sip_start(struct siphash *hash, const u64 *key)
{
	hash->v0 = key[0] ^ 0x736f6d6570736575ULL;
	hash->v1 = key[1] ^ 0x646f72616e646f6dULL;
	hash->v2 = key[0] ^ 0x6c7967656e657261ULL;
	hash->v3 = key[1] ^ 0x7465646279746573ULL;
}

/* The next eight bytes, read as a little-endian number. */
static __always_inline void sip_number(struct siphash *hash, u64 number)
{
	hash->v3 ^= number;
	sip_round(hash);
	sip_round(hash);
	hash->v0 ^= number;
	asm volatile("" : : : "memory"); /* else all words are read beforehand, and kept on a stack that is small */
}

/* The next eight bytes, wherever they lie. */
static __always_inline void sip_bytes(struct siphash *hash, const void *bytes)
{
	u64 word;

	__builtin_memcpy(&word, bytes, sizeof(word));
	sip_number(hash, SIP_LITTLE(word));
}

/* The hash of so many words of eight bytes. */
static __always_inline u64 sip_end(struct siphash *hash, u32 words)
{
	sip_number(hash, (u64)(words * 8 & 0xff) << 56);
	hash->v2 ^= 0xff;
	sip_round(hash);
	sip_round(hash);
	sip_round(hash);
	sip_round(hash);
	return hash->v0 ^ hash->v1 ^ hash->v2 ^ hash->v3;
}

#endif /* SWERVE_PROBE_SIPHASH_H */
