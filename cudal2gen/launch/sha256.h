// SHA-256, which checks the files of a pack.
#ifndef CUDAL2GEN_SHA256_H
#define CUDAL2GEN_SHA256_H

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace cudal2gen {

// SHA-256 (FIPS 180-4) in hexadecimal. Its constants are the first 32 bits of the fractional parts of the square roots of the first
// 8 primes and of the cube roots of the first 64. They are computed here, since a long double has enough digits for them.
class Sha256 {
 public:
  // Returns the digest of the data as 64 hexadecimal digits.
  static std::string hex_digest(std::string data) {
    Sha256 state;
    uint64_t const bits = uint64_t(data.size()) * 8;
    // The padding: a one bit, zeros up to 56 bytes modulo 64, and the number of bits in 8 bytes.
    data.push_back(char(0x80));
    while (data.size() % 64 != 56) data.push_back(0);
    for (int shift = 56; shift >= 0; shift -= 8) data.push_back(char(bits >> shift));
    for (size_t begin = 0; begin < data.size(); begin += 64) state.add_block(reinterpret_cast<unsigned char const*>(data.data()) + begin);
    std::string text;
    for (uint32_t word : state.hash_) {
      char digits[9];
      std::snprintf(digits, sizeof digits, "%08x", unsigned(word));
      text += digits;
    }
    return text;
  }

 private:
  Sha256() {
    for (int number = 2, primes = 0; primes < 64; ++number) {
      bool prime = true;
      for (int divisor = 2; divisor * divisor <= number; ++divisor) prime = prime && number % divisor;
      if (!prime) continue;
      if (primes < 8) hash_[primes] = fraction(std::sqrt((long double)number));
      rounds_[primes++] = fraction(std::cbrt((long double)number));
    }
  }

  static uint32_t fraction(long double root) { return uint32_t((root - std::floor(root)) * 4294967296.0L); }
  static uint32_t rotate(uint32_t word, int by) { return word >> by | word << (32 - by); }

  // Adds 64 bytes to the state. As in the standard, w is the message schedule; v has the working variables a to h in this order.
  void add_block(unsigned char const* data) {
    std::array<uint32_t, 64> w;
    for (int i = 0; i < 16; ++i, data += 4)
      w[i] = uint32_t(data[0]) << 24 | uint32_t(data[1]) << 16 | uint32_t(data[2]) << 8 | data[3];
    for (int i = 16; i < 64; ++i)
      w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    std::array<uint32_t, 8> v = hash_;
    for (int i = 0; i < 64; ++i) {
      uint32_t const t1 = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
                           rounds_[i] + w[i];
      uint32_t const t2 = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (int i = 0; i < 8; ++i) hash_[i] += v[i];
  }

  std::array<uint32_t, 8> hash_;
  std::array<uint32_t, 64> rounds_;
};

}  // namespace cudal2gen

#endif
