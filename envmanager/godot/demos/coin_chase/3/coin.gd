extends "res://addons/envmanager/agent.gd"
# The one who is chased: it stands still or goes in one of four directions, faster than the hero.

const WIDTH := 400.0
const SPEED := 320.0
const HERO_SPEED := 200.0
const MOVES := [Vector2.ZERO, Vector2.RIGHT, Vector2.DOWN, Vector2.LEFT, Vector2.UP]

var move := 0

onready var body: Node2D = get_parent()
onready var hero: Node = $"../../Hero/Agent"


func begin_at(start: Vector2) -> void:
	body.position = start
	move = 0


func observe() -> PoolRealArray:
	var at = body.position / WIDTH
	var from = hero.body.position / WIDTH - at
	var speed = hero.velocity / HERO_SPEED
	return PoolRealArray([from.x, from.y, speed.x, speed.y, 2 * at.x - 1, 2 * at.y - 1])


func act(_continuous: PoolRealArray, discrete: PoolIntArray) -> void:
	move = discrete[0]


# Straight away from the hero, into a corner in the end.
func heuristic() -> void:
	var away = body.position - hero.body.position
	var best = 3 if away.x < 0 else 1
	if abs(away.y) > abs(away.x):
		best = 4 if away.y < 0 else 2
	act(PoolRealArray(), PoolIntArray([best]))


func _physics_process(delta: float) -> void:
	var next = body.position + MOVES[move] * SPEED * delta
	body.position = Vector2(clamp(next.x, 0, WIDTH), clamp(next.y, 0, WIDTH))
