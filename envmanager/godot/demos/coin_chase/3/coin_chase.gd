extends "res://addons/envmanager/arena.gd"
# A hero chases a coin that runs away; what one wins, the other loses.

const WIDTH := 400.0
const MARGIN := 40.0
const REACH := 35.0
const START_APART := 150.0
const MAX_TICKS := 480

var ticks := 0
var distance := 0.0

onready var hero: Node = $"../Hero/Agent"
onready var coin: Node = $"../Coin/Agent"


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	var start = _anywhere(from)
	var target = _anywhere(from)
	while target.distance_to(start) < START_APART:
		target = _anywhere(from)
	hero.begin_at(start)
	coin.begin_at(target)
	ticks = 0
	distance = target.distance_to(start)


func after_tick() -> void:
	var before = distance
	distance = hero.body.position.distance_to(coin.body.position)
	ticks += 1
	_hero_wins((before - distance) / WIDTH - 0.003)
	if distance < REACH:
		_hero_wins(1.0)
		end_episode()
	elif ticks >= MAX_TICKS:
		end_episode(true)


func _hero_wins(amount: float) -> void:
	hero.add_reward(amount)
	coin.add_reward(-amount)


func _anywhere(from: RandomNumberGenerator) -> Vector2:
	return Vector2(from.randf_range(MARGIN, WIDTH - MARGIN), from.randf_range(MARGIN, WIDTH - MARGIN))
